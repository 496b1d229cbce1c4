"""`stream_multimodal`: finished requests, or text as it is generated; errors, aborts, early ends and progress bars."""

import io
import itertools
import sys
import threading
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import tqdm.auto
import tqdm.notebook

import mmvllm.entrypoints.llm
from mmvllm import Delta, RequestOutput, SamplingParams
from mmvllm.errors import RequestError, RequestsAborted
from tests.helpers.engine.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)
IMAGE = noise_image(90, 60)
REQUESTS = [
    ask("Count.", request_id="text"),
    ask(IMAGE, "What?", request_id="image"),
    ask("Several.", request_id="three", sampling_params={"n": 3, "max_tokens": 9, "temperature": 1.5, "seed": 1}),
    ask("Logprobs.", request_id="logprobs", sampling_params={"logprobs": 2, "max_tokens": 5, "ignore_eos": True}),
    ask("Stop.", request_id="stop", sampling_params={"stop": ["e"], "max_tokens": 40, "ignore_eos": True}),
]


def by_completion(deltas: list[Delta]) -> dict[tuple[str, int], list[Delta]]:
    grouped = defaultdict(list)
    for delta in deltas:
        grouped[delta.request_id, delta.index].append(delta)
    return grouped


def test_without_stream_it_yields_finished_requests(llm):
    outputs = list(llm.stream_multimodal(REQUESTS, SHORT))
    assert all(isinstance(output, RequestOutput) for output in outputs) and len(outputs) == len(REQUESTS)


def test_deltas_together_are_the_completions(llm):
    want = {output.request_id: output for output in llm.generate_multimodal(REQUESTS, SHORT, use_tqdm=False)}
    deltas = list(llm.stream_multimodal(REQUESTS, SHORT, stream=True))
    grouped = by_completion(deltas)
    assert set(grouped) == {(name, i) for name in want for i in range(len(want[name].outputs))}
    for (name, i), parts in grouped.items():
        completion = want[name].outputs[i]
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [completion.finish_reason]
    outputs = {delta.request_id: delta.output for delta in deltas if delta.output is not None}
    for (name, i), parts in grouped.items():
        completion = outputs[name].outputs[i]  # of the same call: how requests are batched changes the last bits
        if completion.logprobs is not None:
            assert [row for part in parts for row in part.logprobs] == completion.logprobs
    assert {name: [each.text for each in output.outputs] for name, output in outputs.items()} == {
        name: [each.text for each in output.outputs] for name, output in want.items()
    }


def test_the_output_comes_with_the_last_delta_of_its_request(llm):
    last = {}
    for delta in llm.stream_multimodal(REQUESTS, SHORT, stream=True):
        assert delta.request_id not in last, "nothing follows the output"
        if delta.output is not None:
            last[delta.request_id] = delta
    assert set(last) == {request["request_id"] for request in REQUESTS}


def test_text_comes_while_it_is_generated(llm):
    stream = llm.stream_multimodal(ask("Count."), LONG, stream=True)
    first = next(stream)
    assert first.text and first.output is None and len(first.token_ids) < 100
    assert not llm.engine.is_finished()
    stream.close()


def test_one_request_without_a_list_is_streamed(llm):
    deltas = list(llm.stream_multimodal(ask(IMAGE, "What?"), SHORT, stream=True))
    assert deltas[-1].output.token_ids == llm.generate_multimodal(ask(IMAGE, "What?"), SHORT)[0].token_ids


def test_an_endless_iterable_is_streamed(llm):
    requests = (ask(f"Number {i}.", request_id=str(i)) for i in itertools.count())
    finished = []
    for delta in llm.stream_multimodal(requests, SHORT, stream=True):
        finished += [delta.request_id] if delta.output is not None else []
        if len(finished) == 12:
            break
    assert len(set(finished)) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_closing_a_stream_early_aborts_what_is_left(stream, llm):
    generator = llm.stream_multimodal([ask(str(i)) for i in range(30)], SHORT, stream=stream)
    next(generator)
    generator.close()
    assert llm.engine.is_finished()


@pytest.mark.parametrize("stream", [False, True])
def test_a_consumer_that_raises_aborts_what_is_left(stream, llm):
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream_multimodal([ask(str(i)) for i in range(30)], SHORT, stream=stream):
            raise ZeroDivisionError
    assert llm.engine.is_finished()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_that_is_never_begun_holds_nothing(stream, llm):
    earlier = set(threading.enumerate())
    generator = llm.stream_multimodal([ask("x")] * 5, SHORT, stream=stream)
    assert llm.engine.is_finished() and set(threading.enumerate()) == earlier
    generator.close()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_a_stream_spares_a_later_request_with_the_same_id(stream, llm):
    """The first stream's request has finished, but its output was not taken when another began under its id."""
    first = llm.stream_multimodal(
        [ask("a", request_id="short"), ask("b", request_id="x", sampling_params={"max_tokens": 3, "ignore_eos": True})],
        {"max_tokens": 1},
        stream=stream,
    )
    next(first)
    while "x" in llm.engine.scheduler.groups:
        llm.step()
    llm.add_request("Count.", SHORT, request_id="x")
    first.close()
    assert "x" in llm.engine.scheduler.groups
    outputs = []
    while not llm.engine.is_finished():
        outputs += llm.step()[0]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("x", "length")]


BAD = ask(b"nonsense", "x", request_id="bad")


def test_a_bad_request_is_a_delta_with_an_error(llm):
    deltas = list(llm.stream_multimodal([ask("x"), BAD, ask("y")], SHORT, stream=True, on_error="return"))
    bad = [delta for delta in deltas if delta.request_id == "bad"]
    assert len(bad) == 1 and bad[0].finish_reason == "error" and bad[0].text == "" and bad[0].token_ids == []
    assert "image 0: " in bad[0].output.error and bad[0].output.exception.image_index == 0
    assert sum(delta.output is not None for delta in deltas) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_raised_and_leaves_nothing(stream, llm):
    with pytest.raises(RequestError, match="request 1: image 0: "):
        list(llm.stream_multimodal([ask("x"), BAD, ask("y")], SHORT, stream=stream))
    assert llm.engine.is_finished()


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_step_that_fails_ends_its_requests(on_error, llm, monkeypatch):
    run, calls = llm.engine.model_runner.run, itertools.count()

    def fail_once(*arguments):
        if next(calls) == 2:
            raise RuntimeError("illegal memory access")
        return run(*arguments)

    monkeypatch.setattr(llm.engine.model_runner, "run", fail_once)
    stream = llm.stream_multimodal(ask("x", request_id="r"), LONG, stream=True, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="request 0: the step failed: RuntimeError: illegal memory access"):
            list(stream)
    else:
        last = list(stream)[-1]
        assert last.finish_reason == "error" and "illegal memory access" in last.output.error
        assert len(last.output.token_ids) == 2
    assert llm.engine.is_finished()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_iterable_raises_reaches_the_caller(stream, llm):
    def broken():
        yield ask("x")
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        list(llm.stream_multimodal(broken(), SHORT, stream=stream))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_an_abort_ends_its_request_and_the_others_finish(stream, on_error, llm):
    requests = [{**ask("x", request_id="lost"), "sampling_params": {"n": 2, "max_tokens": 700, "ignore_eos": True}}]
    requests += [ask("y", request_id="kept", sampling_params={"max_tokens": 40, "ignore_eos": True})]

    def work() -> None:
        while llm.abort_request("lost") is None:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    events, raised = [], None
    try:
        events += llm.stream_multimodal(requests, SHORT, stream=stream, on_error=on_error)
    except RequestsAborted as error:
        raised = error
    thread.join()
    assert (raised is not None) == (on_error == "raise")
    if raised is not None:
        assert "request 0: aborted" in str(raised)
        assert [output.request_id for output in raised.outputs] == ["lost"]
        return
    outputs = {each.request_id: each for each in (event.output if stream else event for event in events) if each}
    assert [each.finish_reason for each in outputs["lost"].outputs] == ["aborted", "aborted"]
    assert outputs["kept"].finish_reason == "length" and len(outputs["kept"].token_ids) == 40
    if stream:
        for (name, i), parts in by_completion(events).items():
            assert "".join(part.text for part in parts) == outputs[name].outputs[i].text
            assert parts[-1].finish_reason == outputs[name].outputs[i].finish_reason


@pytest.mark.slow
def test_every_event_before_an_abort_is_yielded_although_it_raises(llm):
    seen = []
    with pytest.raises(RequestsAborted):
        for delta in llm.stream_multimodal(
            [ask("x", request_id="lost"), ask("y", request_id="kept")], LONG, stream=True
        ):
            seen.append(delta)
            if len(seen) == 1:
                llm.abort_request("lost")
    finished = {delta.request_id: delta.output for delta in seen if delta.output is not None}
    assert finished["lost"].finish_reason == "aborted" and finished["kept"].finish_reason == "length"


# Progress bars


class Bars:
    """Records the bars that are made."""

    def __init__(self, monkeypatch):
        self.made = []
        real = mmvllm.entrypoints.llm.tqdm

        def make(*args, **keys):
            bar = real(*args, **keys)
            self.made.append((keys, bar, not bar.disable))
            return bar

        monkeypatch.setattr(mmvllm.entrypoints.llm, "tqdm", make)


def test_tqdm_chooses_the_kind_of_bar():
    assert mmvllm.entrypoints.llm.tqdm is tqdm.auto.tqdm


def test_a_notebooks_bar_is_shown_although_its_output_is_no_terminal(llm, monkeypatch):
    notebook = tqdm.notebook.tqdm_notebook
    widget = SimpleNamespace(value=0, style=SimpleNamespace(bar_color=None))
    container = SimpleNamespace(children=(widget, widget, widget))
    monkeypatch.setattr(notebook, "status_printer", staticmethod(lambda *args, **keys: container))
    monkeypatch.setattr(notebook, "display", lambda self, *args, **keys: None)
    monkeypatch.setattr(mmvllm.entrypoints.llm, "tqdm", partial(notebook, display=False))
    bars = Bars(monkeypatch)
    llm.generate_multimodal([ask("x")] * 3, SHORT)
    llm.generate_multimodal([ask("x")] * 3, SHORT, use_tqdm=False)
    assert [is_shown for _, _, is_shown in bars.made] == [True, False] and bars.made[0][1].n == 3


@pytest.mark.parametrize("call", ["generate", "generate_multimodal", "chat", "stream"])
def test_a_bar_counts_requests_and_tokens_on_a_terminal(call, llm, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    bars = Bars(monkeypatch)
    if call == "generate":
        llm.generate(["x", "y", "z"], SHORT)
    elif call == "chat":
        llm.chat([ask(word)["messages"] for word in "xyz"], SHORT)
    elif call == "stream":
        list(llm.stream_multimodal([ask(word) for word in "xyz"], SHORT, use_tqdm=True, stream=True))
    else:
        llm.generate_multimodal([ask(word) for word in "xyz"], SHORT)
    (keys, bar, _), written = bars.made[0], sys.stderr.getvalue()
    assert len(bars.made) == 1 and keys["total"] == 3 and bar.n == 3
    assert "3/3" in written and "tok/s" in written


def test_no_bar_is_shown_unless_asked_for(llm, capsys):
    list(llm.stream_multimodal([ask("x")], SHORT, stream=True))
    llm.generate("x", SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""

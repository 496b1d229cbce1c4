"""Run engines step by step and check their state."""

import time

from mmvllm import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def slow_steps(engine: AsyncLLM) -> AsyncLLM:
    """Make every step last at least 10 ms, so that a test can observe a long completion while it is generated."""
    real = engine._engine.step

    def step():
        time.sleep(0.01)
        return real()

    engine._engine.step = step
    return engine


def run_at_once(llm, requests: list[dict], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens of requests that are all added before the first step, however long their preparation takes."""
    order, outputs = [], {}
    for request in requests:
        prompt = llm.processor(request)
        order.append(llm.engine.add_request(prompt, params))
    while not llm.engine.is_finished():
        outputs |= {output.request_id: output.token_ids for output in llm.engine.step()[0]}
    return [outputs[request_id] for request_id in order]


def assert_idle(llm) -> None:
    assert_engine_idle(llm.engine)


def assert_engine_idle(engine) -> None:
    scheduler = engine.scheduler
    scheduler.check()
    assert not scheduler.groups and not scheduler.running and not scheduler.waiting
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


def begin_together(monkeypatch, llm: LLM, number: int) -> None:
    """Let a call compute nothing until all of its requests are in the engine, however long their preparation takes."""
    step = llm.engine.step

    def step_with_all() -> tuple[list, int]:
        if len(llm.engine.scheduler.groups) < number:
            time.sleep(0.001)
            return [], 0
        monkeypatch.setattr(llm.engine, "step", step)
        return step()

    monkeypatch.setattr(llm.engine, "step", step_with_all)

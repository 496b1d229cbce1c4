"""The prompts of an image as requests of their own, so given that they share what the engine has computed."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from mmvllm.entrypoints.intake import Prefetcher, Prepared
from mmvllm.inputs import EngineInput


class PromptPrefetcher:
    """Stands for a `Prefetcher` whose requests have several prompts: gives a request for each prompt.

    The first prompt of an image is given at once, the others when its tokens have been computed: then the KV of all
    that is before the prompt's text is in the prefix cache, and the image is not encoded again. Prompt i of the image
    with index j has the index j * num_prompts + i.

    Args:
        num_prompts: of the image with the most prompts.
        is_computed: whether the request with this id, given before, has been computed, or has ended in any way.
    """

    def __init__(self, prefetcher: Prefetcher, num_prompts: int, is_computed: Callable[[str], bool]):
        self._prefetcher, self._num_prompts, self._is_computed = prefetcher, num_prompts, is_computed
        self._held: deque[tuple[str, deque[Prepared]]] = deque()  # by the id of the first prompt's request

    def get(self, wait: bool) -> Prepared | None:
        """The next request, as of `Prefetcher`; further prompts come before other images."""
        if (prepared := self._take()) is not None:
            return prepared
        item = self._prefetcher.get(wait and not self._held)
        return None if item is None else self._first(item)

    @property
    def is_exhausted(self) -> bool:
        """Whether every request has been handed out."""
        return not self._held and self._prefetcher.is_exhausted

    @property
    def wait_share(self) -> float:
        """That of `Prefetcher`."""
        return self._prefetcher.wait_share

    def finish(self) -> None:
        """Take no more images; those taken before are still given, with all their prompts."""
        self._prefetcher.finish()

    def close(self) -> None:
        """Stop preparing; what has been prepared is dropped."""
        self._held.clear()
        self._prefetcher.close()

    def _take(self) -> Prepared | None:
        for number, (request_id, others) in enumerate(self._held):
            if self._is_computed(request_id):
                prepared = others.popleft()
                if not others:
                    del self._held[number]
                return prepared
        return None

    def _first(self, item: Prepared) -> Prepared:
        first = replace(item, index=item.index * self._num_prompts)
        if item.prompt.exception() is None and (others := item.prompt.result().others):
            request = {key: value for key, value in item.request.items() if key != "request_id"}
            prepared = (Prepared(first.index + number, request, _done(other)) for number, other in enumerate(others, 1))
            self._held.append((item.request["request_id"], deque(prepared)))
        return first


def _done(prompt: EngineInput) -> "Future[EngineInput]":
    future: Future[EngineInput] = Future()
    future.set_result(prompt)
    return future

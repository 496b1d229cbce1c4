"""POST /rerank and /score: texts compared by the cosine similarity of their embeddings."""

import numpy as np
import pytest

from tests.helpers.serving import server
from tests.helpers.serving.server import EMBEDDINGS, make_app
from tests.server.refusals import check_refusal, refusal

BODIES = {"/rerank": {"query": "a", "documents": ["b"]}, "/score": {"text_1": "a", "text_2": "b"}}
QUERY, DOCUMENTS = "A red star", ["A blue circle", "The red star", "A red star", "Nothing"]


def answered(app, path: str, **body) -> dict:
    return server.answered(app, path, body)


def similarities(app, queries: list[str], documents: list[str], **keys) -> np.ndarray:
    """Compute the similarity of each query to each document from the vectors of /v1/embeddings."""
    data = answered(app, EMBEDDINGS, input=queries + documents, **keys)["data"]
    vectors = np.array([one["embedding"] for one in data])
    return vectors[: len(queries)] @ vectors[len(queries) :].T


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_the_similarity_of_their_embeddings_to_the_query(path, app):
    [want] = similarities(app, [QUERY], DOCUMENTS)
    answer = answered(app, path, model="bundled", query=QUERY, documents=DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == np.argsort(-want).tolist()
    for one in answer["results"]:
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
        np.testing.assert_allclose(one["relevance_score"], want[one["index"]], atol=1e-5)
    assert answer["results"][0]["index"] == 2 and answer["model"] == "bundled"
    count = answered(app, EMBEDDINGS, input=[QUERY, *DOCUMENTS])["usage"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == count["prompt_tokens"]


@pytest.mark.parametrize(("top_n", "number"), [(0, 4), (1, 1), (3, 3), (9, 4), (2.0, 2)])
def test_only_the_most_similar_documents_are_returned(top_n, number, app):
    full = answered(app, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    some = answered(app, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=top_n)["results"]
    assert [one["index"] for one in some] == [one["index"] for one in full[:number]]


def test_documents_may_be_objects_and_are_left_out_if_they_are_not_wanted(app):
    plain = answered(app, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    documents = [{"text": text} for text in DOCUMENTS]
    objects = answered(app, "/rerank", query={"text": QUERY}, documents=documents)["results"]
    assert [one["document"] for one in objects] == [one["document"] for one in plain]
    bare = answered(app, "/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)["results"]
    assert [one["index"] for one in bare] == [one["index"] for one in plain]
    assert all(one.keys() == {"index", "relevance_score"} for one in bare)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("first", ["queries", "text_1", "data_1"])
@pytest.mark.parametrize("second", ["documents", "items", "text_2", "data_2"])
def test_scores_are_similarities_in_the_order_of_the_texts(path, first, second, app):
    [want] = similarities(app, [QUERY], DOCUMENTS)
    answer = answered(app, path, **{first: QUERY, second: DOCUMENTS})
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(len(DOCUMENTS))]
    np.testing.assert_allclose([one["score"] for one in answer["data"]], want, atol=1e-5)
    assert answer["object"] == "list"


def test_as_many_texts_of_both_sides_are_compared_in_pairs(app):
    queries = DOCUMENTS[::-1]
    want = np.diagonal(similarities(app, queries, DOCUMENTS))
    data = answered(app, "/score", text_1=queries, text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["score"] for one in data], want, atol=1e-5)
    assert len(answered(app, "/score", text_1=QUERY, text_2=QUERY)["data"]) == 1


@pytest.mark.parametrize(
    "keys",
    [{"pooling": "mean"}, {"truncate_prompt_tokens": 2}, {"truncate_prompt_tokens": 2, "truncation_side": "right"}],
)
def test_embeddings_are_made_as_the_request_says(keys, app):
    [want] = similarities(app, [QUERY], DOCUMENTS, **keys)
    data = answered(app, "/score", text_1=QUERY, text_2=DOCUMENTS, **keys)["data"]
    np.testing.assert_allclose([one["score"] for one in data], want, atol=1e-5)
    assert not np.allclose(want, similarities(app, [QUERY], DOCUMENTS)[0], atol=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/rerank", {"documents": ["a"]}, "query", "missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "at least 1"),
        ("/rerank", {"query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents[0]", "and nothing else"),
        ("/rerank", {"query": "a", "documents": ["b", "<|image_pad|>", "c"]}, "documents[1]", "placeholder"),
        ("/score", {"text_1": "<|image_pad|>", "text_2": ["b", "c"]}, "text_1", "placeholder"),
        ("/score", {"text_1": ["a", "<|image_pad|>"], "text_2": ["b", "c"]}, "text_1[1]", "placeholder"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", "not supported"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_k": 1}, "top_k", "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "other"}, "model", "other"),
        ("/rerank", {"query": "a " * 5000, "documents": ["b"]}, "query", "maximum context length"),
        ("/rerank", {"query": "a", "documents": ["b", "a " * 5000]}, "documents[1]", "maximum context length"),
        ("/score", {"text_2": "a"}, "queries", "give one of queries, text_1, data_1"),
        ("/score", {"text_1": "a", "data_1": "a", "text_2": "a"}, "queries", "got 2 of them"),
        ("/score", {"text_1": "a"}, "documents", "give one of documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many as text_2, 3, got 2"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1", "at least 1"),
        ("/score", {"text_1": "a", "text_2": ["a", None]}, "text_2[1]", "string"),
    ],
)
def test_bodies_that_cannot_be_compared_are_refused_with_the_field(path, body, param, words, app):
    check_refusal(app, path, body, param, words)


@pytest.mark.parametrize("path", ["/rerank", "/score"])
@pytest.mark.parametrize("mode", ["facts", "full"])
def test_requests_are_logged(engine, path, mode, caplog):
    app = make_app(engine, log_requests=mode)
    assert answered(app, path, **BODIES[path])["id"] in caplog.text
    too_long = BODIES[path] | {"query" if path == "/rerank" else "text_1": "a " * 5000}
    refusal(app, path, too_long)

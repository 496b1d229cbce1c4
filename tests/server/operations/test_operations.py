"""Models, health, metrics, API keys, CORS and request ids."""

import pytest

import mmvllm
from mmvllm.server.app import build_app
from mmvllm.server.settings import ServerSettings
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    answered,
    call,
    chat,
    data_uri,
    error_of,
    image_part,
    make_app,
    metric_samples,
)
from tests.server.refusals import check_refusal, refusal

OPEN = {"/health", "/health/live", "/health/ready", "/ping", "/load", "/metrics", "/version"}
REDIRECTS = {"/", "/favicon.ico", "/demo"}  # to the page


def test_every_route_needs_the_key_unless_it_is_known_to_need_none(engine):
    app = make_app(engine, api_keys=("secret",), allow_lora_updating=True, enable_tokenizer_info_endpoint=True)
    paths = app.openapi()["paths"].keys()
    assert paths > OPEN
    for path in {*paths, *REDIRECTS, "/docs", "/openapi.json", "/no/such/route", "/healthy", "/health/live/x"}:
        for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
            assert (call(app, method, path).status_code == 401) is (path not in OPEN | REDIRECTS), (method, path)
    for path in ("/docs", "/openapi.json", "/v1/models"):
        assert call(app, "GET", path, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_cors_allows_configured_origins_also_for_errors(engine):
    app = make_app(engine, api_keys=("secret",), cors_origins=("https://a.example",))
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = call(app, "OPTIONS", CHAT, headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = call(app, "POST", CHAT, json={}, headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    other = call(app, "OPTIONS", CHAT, headers=asks | {"Origin": "https://b.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_docs_lists_the_routes_and_loads_nothing(app):
    answer = call(app, "GET", "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in call(app, "GET", "/openapi.json").json()["paths"]:
        assert path in answer.text
    assert "//" not in answer.text and "<script" not in answer.text and 'href="openapi.json"' in answer.text
    head = call(app, "HEAD", "/docs")
    assert (head.status_code, head.headers["content-type"]) == (200, answer.headers["content-type"])
    assert call(app, "POST", "/docs").status_code == 405


def test_cors_is_off_by_default(app):
    answer = call(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_version_health_and_models(app):
    assert call(app, "GET", "/version").json() == {"version": mmvllm.__version__}
    assert call(app, "GET", "/health").json() == {"status": "ok", "reason": None}
    [model] = call(app, "GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("bundled", 2048)
    other = call(app, "GET", "/v1/models/a/b")
    assert other.status_code == 404
    assert error_of(other)["message"] == "the model 'a/b' does not exist; served: 'bundled'"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_supports_head_requests(app, path):
    assert call(app, "HEAD", path).status_code == 200


def test_a_model_may_have_several_names_which_may_contain_slashes(engine):
    names = ("Qwen/Qwen2-VL-2B", "gpt-4o")
    app = build_app(engine, ServerSettings(model_names=names))
    assert tuple(model["id"] for model in call(app, "GET", "/v1/models").json()["data"]) == names
    for name in names:
        assert call(app, "GET", f"/v1/models/{name}").json()["id"] == name
        assert answered(app, COMPLETIONS, {"model": name, "prompt": "x"})["model"] == name
    words = "served: 'Qwen/Qwen2-VL-2B' and 'gpt-4o'"
    check_refusal(app, COMPLETIONS, {"model": "gpt-4", "prompt": "x"}, "model", words)


def test_every_response_has_a_unique_request_id(app):
    paths = ("/version", "/nowhere", "/v1/models/none", "/version")
    ids = [call(app, "GET", path).headers["x-request-id"] for path in paths]
    assert all(len(one) > 20 for one in ids) and len(set(ids)) == 4


def test_responses_of_middleware_are_counted_by_path(engine):
    app = build_app(engine, ServerSettings(model_names=("bundled",), api_keys=("secret",)))
    for path in (CHAT, "/v1/no-such-path"):
        assert call(app, "POST", path, json={}).status_code == 401
    counted = {key[1:]: value for key, value in metric_samples(app).items() if key[0] == "mmvllm_http_responses_total"}
    assert counted[("path", CHAT), ("status", "401")] == counted[("path", "other"), ("status", "401")] == 1


@pytest.mark.parametrize(
    "accept", ["text/plain; version=zzz", "application/openmetrics-text; version=abc", ";", "\xff"]
)
def test_metrics_are_sent_whatever_a_client_accepts(app, accept):
    answer = call(app, "GET", "/metrics", headers={"Accept": accept.encode("latin-1")})
    assert answer.status_code == 200 and "# TYPE" in answer.text


@pytest.mark.spawns
def test_metrics_are_valid_and_count_requests(app):
    before = metric_samples(app)
    answered(app, CHAT, chat(image_part(data_uri()), max_tokens=3, ignore_eos=True, n=2))
    refusal(app, CHAT, {})
    assert call(app, "GET", "/no/such/path").status_code == 404
    after = metric_samples(app)

    def moved(name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert moved("mmvllm_http_responses_total", path=CHAT, status="200") == 1
    assert moved("mmvllm_http_responses_total", path=CHAT, status="400") == 1
    assert moved("mmvllm_http_responses_total", path="other", status="404") == 1
    assert moved("mmvllm_answers_total", finish_reason="length") == 2
    assert moved("mmvllm_output_tokens_total") == 6 and moved("mmvllm_images_total") == 1
    assert moved("mmvllm_prompt_tokens_total") > 10 and moved("mmvllm_requests_finished_total") == 1
    for name in ("first_token", "per_token", "end_to_end"):
        assert moved(f"mmvllm_{name}_seconds_count") == 1 and moved(f"mmvllm_{name}_seconds_sum") > 0
    assert after["mmvllm_ready",] == 1 and after["mmvllm_sequences_running",] == 0

"""`python -m bench serve-packed` without its stack, and what it asks a stack over a socket. (`--shape tiny` tries all
of it on a CPU in two minutes.)"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from bench import random_checkpoint, serve_packed
from bench.judges.checkpoint import word_ids
from bench.results import Entry
from bench.scoring import log_probabilities
from bench.serve_packed import ServePacked
from bench.served_answers import Answer, Asking, agreeing, words
from services.engine.config import EngineConfig
from services.engine.weights import pack
from services.engine.weights.loader import load_model

CPU = torch.device("cpu")


def test_what_was_served_beside_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that says words only, packed; greedy tokens are the reference's, and any other ones are not."""
    random_checkpoint.write(tmp_path / "source", 4, CPU, 0, serve_packed.TINY, word_ids())
    head = load_file(tmp_path / "source" / "model-00004.safetensors")["lm_head.weight"].float()
    said = torch.zeros(len(head), dtype=torch.bool)
    said[word_ids()] = True
    assert head[said].std() == pytest.approx(0.02, rel=0.05)
    assert head[~said].std() == pytest.approx(0.0002, rel=0.05)

    packed = tmp_path / "gsq3"
    assert pack.main([str(tmp_path / "source"), "--recipe", "gsq3", "-o", str(packed), "--device", "cpu"]) == 0
    with torch.inference_mode():
        model = load_model(
            EngineConfig(model=str(packed), device="cpu", weights="dense"), lambda share, what: None
        ).model
    monkeypatch.setattr(serve_packed, "_REFERENCE_PROMPTS", 2)
    monkeypatch.setattr(serve_packed, "_REFERENCE_ANSWER", 6)
    served = []
    for seed in range(2):
        ids = word_ids()[seed * 20 : seed * 20 + 20]
        for _ in range(6):
            ids.append(int(log_probabilities(model, ids, len(ids) - 1)[0].argmax()))
        assert set(ids) <= set(word_ids())
        served.append((ids[:20], ids[20:]))

    found: list[Entry] = []
    bench = ServePacked(serve_packed._options(["--folder", str(tmp_path), "--device", "cpu"]), found.append)
    bench._compare("gsq3", packed, served)
    assert [(entry.name, entry.value) for entry in found] == [
        ("serve-packed/gsq3/reference-first", 1.0),
        ("serve-packed/gsq3/reference-gap", 0.0),
    ]
    assert bench._stages.failures == []
    bench._compare("gsq3", packed, [(prompt, answer[::-1]) for prompt, answer in served])
    assert [failure.partition(": ")[2][:4] for failure in bench._stages.failures] == ["only", "serv"]


def test_a_stage_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    stages = serve_packed.Stages()
    with stages.stage("first"):
        raise RuntimeError("the end of the log")
    with stages.stage("second"):
        stages.check(True, "holds")
    assert stages.failures == ["first: RuntimeError: the end of the log"]
    assert "-- second" in capsys.readouterr().out


def test_words() -> None:
    assert words(" river stone") == [" river", " stone"]
    for text in ("river", " river  stone", " River", " x1"):
        with pytest.raises(ValueError, match="not only words"):
            words(text)
    assert agreeing(" a b c", " a b d e") == 2
    assert agreeing("", " a") == 0


def usage(prompt: int, tokens: int, cached: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens, **details}


class Recorded(BaseHTTPRequestHandler):
    """Answers of a stack."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({"path": self.path, **body})
        status, kind = 200, "application/json"
        if body.get("messages", [{}])[0].get("content") == "fail":
            status, data = 503, '{"error": {"message": "no engine"}}'
        elif "prompt" in body:
            choice = {"text": " river lamp", "finish_reason": "length"}
            data = json.dumps({"choices": [choice], "usage": usage(3, 2, 0)})
        elif not body.get("stream"):
            choice = {"message": {"reasoning_content": " a b", "content": None}, "finish_reason": "length"}
            data = json.dumps({"choices": [choice], "usage": usage(9, 2, 4)})
        else:
            kind = "text/event-stream"
            deltas = [{"role": "assistant"}, {"reasoning_content": " a"}, {"content": " b"}]
            chunks: list[dict[str, Any]] = [{"choices": [{"delta": d, "finish_reason": None}]} for d in deltas]
            chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
            chunks.append({"choices": [], "usage": usage(9, 2, 0)})
            data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Recorded.bodies = []
    with HTTPServer(("127.0.0.1", 0), Recorded) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_answers_as_a_stack_sends_them(url: str) -> None:
    asking = Asking(url, 2)
    whole, streamed = asking.chat("hello", "one"), asking.chat("hello", "one", stream=True)
    assert whole.text == streamed.text == " a b"
    assert (whole.prompt, whole.tokens, whole.cached, whole.finish) == (9, 2, 4, "length")
    assert (streamed.cached, len(streamed.arrivals), streamed.finish) == (0, 2, "length")
    assert streamed.rate == pytest.approx(1 / (streamed.arrivals[1] - streamed.arrivals[0]))
    assert [answer.text for answer in asking.together(("x", "y"), "two", limit=7)] == [" a b", " a b"]
    assert asking.complete([5, 6, 7], 2).text == " river lamp"
    assert {body["temperature"] for body in Recorded.bodies} == {0}
    assert [body.get("cache_salt") for body in Recorded.bodies] == ["one", "one", "two", "two", None]
    assert [body["max_tokens"] for body in Recorded.bodies] == [2, 2, 7, 7, 2]
    with pytest.raises(httpx.HTTPStatusError, match=r"503 .*no engine"):
        asking.chat("fail", "one", stream=True)


def test_what_counts_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_packed, "_ANSWER", 2)
    assert serve_packed._is_whole(Answer(" a b", usage(9, 2, 9), "length", (0.1,)))
    assert not serve_packed._is_whole(Answer(" a b", usage(9, 2, 0), "stop", (0.1,)))
    assert not serve_packed._is_whole(Answer(" a b", usage(9, 3, 0), "length", (0.1,)))
    assert not serve_packed._is_whole(Answer(" a", usage(9, 2, 0), "length", (0.1,)))
    assert not serve_packed._is_whole(Answer(" a b", {**usage(9, 2, 0), "total_tokens": 9}, "length", (0.1,)))

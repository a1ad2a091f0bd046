import json
import queue
import threading
import time
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from services.engine.batch import Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.core import EngineCore
from services.engine.mailbox import CancelRequest, Message, StepResult, Stop, Submit
from services.engine.request import Request
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.scripted import VOCABULARY, Script, ScriptedRunner, ScriptError, load_script, scripted_bundle
from services.engine.scripted_vocabulary import IM_END, encode, last_user_message
from services.protocol.generate import SamplingParams, TokenDelta


def script_of(tmp_path: Path, *lines: object) -> Script:
    path = tmp_path / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_script(path)


def prompt_of(*turns: str) -> list[int]:
    text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    return list(encode(f"{text}<|im_start|>assistant\n".encode()))


def text_of(tokens: list[int]) -> str:
    return b"".join(VOCABULARY[token] for token in tokens).decode()


class Player:
    """Rows for one request by hand, at times of the test's choosing."""

    def __init__(self, script: Script, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.runner = ScriptedRunner(script)
        self.prompt = prompt
        self.output: list[int] = []

    def play(self) -> Sampled:
        spec = SampleSpec(SamplingParams(max_tokens=1000), self.prompt, self.output)
        row = Row("r", [0], 0, [0], 0, spec)
        output = self.runner.run(ScheduledBatch(1, (row,)))
        self.output += output.sampled["r"].tokens
        return output.sampled["r"]


def test_pieces_come_one_by_one_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(tmp_path, {"when": "hi", "pieces": ["Hel", "lo <think>", "!"], "delay_ms": 20})
    player = Player(script, prompt_of("user\nhi"), monkeypatch)
    waiting = player.play()
    assert waiting.tokens == ()
    assert waiting.due == pytest.approx(100.02, abs=0.0011)
    assert waiting.due >= 100.02
    player.now = 100.02
    assert player.play().tokens == encode(b"Hel")
    assert player.play().tokens == ()
    player.now = 100.0401
    second = player.play()
    assert second.tokens == encode(b"lo <think>")
    assert len(second.tokens) == 4, "a special token's name is one token"
    player.now = 100.06
    third = player.play()
    assert third.tokens == encode(b"!")
    assert third.due == 0.0
    assert player.play() == Sampled((IM_END,), "stop")


def test_an_answer_may_end_by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(tmp_path, {"when": "", "pieces": ["a"], "finish": "length"})
    player = Player(script, prompt_of("user\nx"), monkeypatch)
    assert player.play() == Sampled((97,))
    assert player.play() == Sampled((), "length")


def test_an_answer_may_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(tmp_path, {"when": "a", "pieces": []}, {"when": "b", "pieces": [], "finish": "length"})
    assert Player(script, prompt_of("user\na"), monkeypatch).play() == Sampled((IM_END,), "stop")
    assert Player(script, prompt_of("user\nb"), monkeypatch).play() == Sampled((), "length")


def test_the_rate_is_exact_and_a_stall_makes_no_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(tmp_path, {"when": "", "pieces": ["x"] * 100, "delay_ms": 10})
    player = Player(script, prompt_of("user\nx"), monkeypatch)
    player.play()
    count = 0
    for tick in range(1, 251):  # looked at every 4 ms, for a second
        player.now = 100 + tick * 0.004
        count += len(player.play().tokens)
    assert 98 <= count <= 100
    player = Player(script, prompt_of("user\nx"), monkeypatch)
    player.play()
    player.now = 150.0
    assert [len(player.play().tokens) for _ in range(5)] == [1, 1, 0, 0, 0]


def test_a_resumed_answer_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(tmp_path, {"when": "", "pieces": ["abc", "def", "ghi"]})
    player = Player(script, prompt_of("user\nx"), monkeypatch)
    player.output = list(b"abcd")
    assert player.play().tokens == tuple(b"ef")
    assert player.play().tokens == tuple(b"ghi")
    assert player.play().finish == "stop"


def test_the_first_line_that_matches_the_last_user_message_answers(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        {"when": "weather", "pieces": ["sun"]},
        {"when": "weather in Oslo", "pieces": ["rain"]},
        {"when": "\u00e9t\u00e9", "pieces": ["summer"]},
    )

    def said(*turns: str) -> str:
        return text_of(list(script.answer(last_user_message(prompt_of(*turns))).tokens))

    assert said("user\nweather in Oslo?") == "sun<|im_end|>"
    assert said("user\nweather", "assistant\nsun", "user\nl'\u00e9t\u00e9") == "summer<|im_end|>"
    assert said("system\nweather", "user\nhello") == (
        "No line of script.jsonl matches the last user message.<|im_end|>"
    )
    assert said("user\n<tool_response>\nweather: wet\n</tool_response>") == "sun<|im_end|>"


def test_an_answer_may_quote_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quote = {"quote": r"word is (\w+)"}
    script = script_of(tmp_path, {"when": "again", "pieces": ["It is ", quote, "."]}, {"when": "", "pieces": [quote]})
    player = Player(
        script, prompt_of("user\nmy word is \u00c9mu", "user\nnow the word is heron", "user\nagain"), monkeypatch
    )
    assert [text_of(list(player.play().tokens)) for _ in range(4)] == ["It is ", "heron", ".", "<|im_end|>"]
    other = Player(script, prompt_of("user\nthe word is \u00c9mu"), monkeypatch)
    assert text_of(list(other.play().tokens)) == "\u00c9mu"
    none = Player(script, prompt_of("user\nno such"), monkeypatch)
    assert text_of(list(none.play().tokens)) == r"[word is (\w+) is not in the prompt]"


def test_a_line_may_look_at_the_whole_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(
        tmp_path, {"when": "", "given": "You write titles", "pieces": ["T"]}, {"when": "", "pieces": ["A"]}
    )
    titles = prompt_of("system\nYou write titles.", "user\nhi")
    assert text_of(list(Player(script, titles, monkeypatch).play().tokens)) == "T"
    assert text_of(list(Player(script, prompt_of("user\nhi"), monkeypatch).play().tokens)) == "A"


def test_a_prompt_without_turns_is_matched_whole() -> None:
    assert last_user_message(encode("plain t\u00ebxt <think>".encode())) == "plain t\u00ebxt <think>"
    assert last_user_message([0xC3, 104, 9999]) == "\ufffdh"
    assert last_user_message(encode(b"<|im_start|>user\nno end")) == "no end"


def test_pieces_may_cut_anywhere(tmp_path: Path) -> None:
    script = script_of(
        tmp_path, {"when": "", "pieces": ["<th", "ink>", {"hex": "f09f"}, {"hex": "9880"}, "<think></think>"]}
    )
    (answer,) = script.answers
    assert text_of(list(answer.tokens)) == "<think>\U0001f600<think></think><|im_end|>"
    assert answer.ends == (3, 7, 9, 11, 13, 14)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "JSON is malformed|truncated"),
        ('{"pieces": []}', "missing required field `when`"),
        ('{"when": "a"}', "missing required field `pieces`"),
        ('{"when": "a", "pieces": [1]}', "pieces"),
        ('{"when": "a", "pieces": ["x", ""]}', "piece 1 is empty"),
        ('{"when": "a", "pieces": [{"hex": "f"}]}', "piece 0: "),
        ('{"when": "a", "pieces": [], "finish": "eos"}', "finish"),
        ('{"when": "a", "pieces": [], "delay_ms": -1}', "delay_ms"),
        ('{"when": "a", "pieces": [], "delay": 1}', "unknown field `delay`"),
        ('{"when": "a", "pieces": [{"quote": "a("}]}', "piece 0: "),
        ('{"when": "a", "pieces": [{"quote": "a"}]}', "piece 0: the quote's pattern has no group"),
        ('{"when": "a", "pieces": [{"quote": "(a)", "hex": "f0"}]}', "piece 0 is neither"),
        ('{"when": "a", "pieces": [{}]}', "piece 0 is neither"),
        ("[]", "Expected `object`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"when": "ok", "pieces": ["x"]}\n\n' + line + "\n")
    with pytest.raises(ScriptError, match=rf"bad\.jsonl:3: .*({reason})"):
        load_script(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"when": "\xff", "pieces": []}\n')
    with pytest.raises(ScriptError, match=r"bad\.jsonl:1: "):
        load_script(path)


def test_a_script_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"none\.jsonl: No such file"):
        load_script(tmp_path / "none.jsonl")
    with pytest.raises(ScriptError, match=r"a directory"):
        load_script(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ScriptError, match="has no line"):
        load_script(tmp_path / "empty.jsonl")


def test_equal_scripts_have_equal_fingerprints(tmp_path: Path) -> None:
    one = script_of(tmp_path, {"when": "a", "pieces": ["x"]})
    same = script_of(tmp_path, {"when": "a", "pieces": ["x"]})
    other = script_of(tmp_path, {"when": "a", "pieces": ["y"]})
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_the_bundle_is_the_vocabulary() -> None:
    bundle = scripted_bundle()
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    assert tokenizer.get_vocab_size() == len(VOCABULARY) == 265
    said = "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600  \t<think>x</think>\n<tool_call>{}</tool_call>"
    text = f"<|im_start|>user\n{said}<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tuple(ids) == encode(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert shown == text.removeprefix("<|im_start|>").removesuffix("<|im_end|>"), "marks are text, specials are not"
    assert bundle.special.stop_ids == (258, 256)


def test_every_byte_is_its_own_id() -> None:
    tokenizer = Tokenizer.from_str(scripted_bundle().tokenizer_json)
    for value in range(0x80):
        assert tokenizer.encode(chr(value), add_special_tokens=False).ids == [value]
    assert tokenizer.encode("\u00ff", add_special_tokens=False).ids == [0xC3, 0xBF]


def test_the_template_renders_turns_tools_and_results() -> None:
    template = jinja2.Environment(autoescape=False).from_string(scripted_bundle().chat_template)
    plain = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    call = {"function": {"name": "ls", "arguments": {"path": "/"}}}
    text = template.render(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "a b"},
        ],
        tools=[{"function": {"name": "ls"}}],
    )
    assert text.count("be brief") == 1
    assert '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call><|im_end|>\n' in text
    assert last_user_message(encode(text.encode())) == "<tool_response>\na b\n</tool_response>"


class Engine:
    def __init__(self, script: Script, pages: int = 64, max_running: int = 64) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        config = SchedulerConfig(script.fingerprint, pages, max_model_len=32_768, max_running=max_running)
        core = EngineCore(Scheduler(config), ScriptedRunner(script), self.inbox, self.results.put)
        self.thread = threading.Thread(target=core.run, daemon=True)
        self.thread.start()

    def submit(self, name: str, prompt: list[int], max_tokens: int = 10_000) -> None:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(IM_END,))
        self.inbox.put(Submit(Request(name, "g", prompt, [], 0, params)))

    def until_final(self, *names: str) -> dict[str, list[TokenDelta]]:
        deltas: dict[str, list[TokenDelta]] = {name: [] for name in names}
        left = set(names)
        while left:
            for _, delta in self.results.get(timeout=20).deltas:
                deltas[delta.request_id].append(delta)
                if delta.finish is not None:
                    left.discard(delta.request_id)
        return deltas

    def stop(self) -> None:
        self.inbox.put(Stop())
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_each_piece_is_one_delta_through_the_real_loop(tmp_path: Path) -> None:
    pieces = ["Hello", " wor", "ld", "<tool_call>{}", "</tool_call>"]
    engine = Engine(script_of(tmp_path, {"when": "hi", "pieces": pieces, "delay_ms": 3}))
    prompt = prompt_of("user\nhi")
    began = time.monotonic()
    engine.submit("a", prompt)
    deltas = engine.until_final("a")["a"]
    assert time.monotonic() - began >= 0.015
    assert [text_of(list(delta.tokens)) for delta in deltas] == [*pieces, "<|im_end|>"]
    usage = deltas[-1].usage
    assert deltas[-1].finish == "stop"
    assert usage is not None
    assert (usage.prompt_tokens, usage.computed_tokens) == (len(prompt), len(prompt))
    engine.stop()


def test_a_cached_prompt_is_matched_as_well(tmp_path: Path) -> None:
    engine = Engine(script_of(tmp_path, {"when": "needle", "pieces": ["found"]}))
    prompt = prompt_of("user\nneedle" + "x" * 200)
    for name in ("first", "second"):
        engine.submit(name, prompt)
        last = engine.until_final(name)[name]
        assert text_of(list(last[0].tokens)) == "found"
    usage = last[-1].usage
    assert usage is not None
    assert usage.cached_device >= 192
    engine.stop()


def test_preempted_answers_are_whole(tmp_path: Path) -> None:
    pieces = [f"piece {index} " for index in range(60)]
    engine = Engine(script_of(tmp_path, {"when": "", "pieces": pieces, "delay_ms": 1}), pages=20, max_running=4)
    names = ["a", "b", "c", "d"]
    for name in names:
        engine.submit(name, prompt_of(f"user\n{name}"))
    deltas = engine.until_final(*names)
    usages = [deltas[name][-1].usage for name in names]
    assert sum(usage.preemptions for usage in usages if usage is not None) > 0
    for name in names:
        tokens = [token for delta in deltas[name] for token in delta.tokens]
        assert text_of(tokens) == "".join(pieces) + "<|im_end|>"
    engine.stop()


def test_max_tokens_and_cancel_end_a_script_early(tmp_path: Path) -> None:
    engine = Engine(
        script_of(
            tmp_path,
            {"when": "slow", "pieces": ["never"], "delay_ms": 3_600_000},
            {"when": "long", "pieces": ["abc"] * 100},
        )
    )
    engine.submit("long", prompt_of("user\nlong"), max_tokens=10)
    deltas = engine.until_final("long")["long"]
    assert sum(len(delta.tokens) for delta in deltas) == 10
    assert deltas[-1].finish == "length"
    engine.submit("slow", prompt_of("user\nslow"))
    engine.inbox.put(CancelRequest("slow"))
    assert engine.until_final("slow")["slow"][-1].finish == "cancel"
    engine.stop()


def test_what_is_kept_of_cancelled_requests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedRunner, "KEPT", 3)
    runner = ScriptedRunner(script_of(tmp_path, {"when": "", "pieces": ["x"], "delay_ms": 1000}))
    spec = SampleSpec(SamplingParams(max_tokens=5), prompt_of("user\nx"), [])
    for index in range(10):
        runner.run(ScheduledBatch(index, (Row(f"r{index}", [0], 0, [0], 0, spec),)))
    assert len(runner._plays) == 3

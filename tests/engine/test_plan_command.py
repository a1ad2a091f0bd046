"""What a person sees of `python -m services.engine.plan`, which `samovar plan` starts."""

import re

import pytest

from services.engine import plan
from tests.engine.tiny_prompts import MODEL


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"--model {MODEL} --vram 2GiB --context 8192 --kv-format fp8 --spec mtp:3 --sessions 4 --max-running 8"
    asked += " --state-dtype float16"
    assert plan.main(asked.split()) == plan.OK
    printed = capsys.readouterr().out
    # 2 layers and 1 of the draft head, 2 heads, K and V, 64 codes and a float16 or wider scale a row.
    assert re.search(
        r"^K  KV pages +[\d.]+ (MiB|GiB) +[\d.]+%  [\d,]+ of 64 tokens and a blank one, 5\d\d bytes", printed, re.M
    )
    assert re.search(r"^d  draft KV pages .* 2\d\d bytes a token", printed, re.M)
    assert re.search(r"^S  states .* slots of \d+ KiB in float16", printed, re.M)
    assert re.search(r"^w  workspace .* tokens; or 32 rows of", printed, re.M)  # 8 requests with 3 drafts each
    assert re.search(r"^   all +2\.00 GiB +$", printed, re.M)
    assert re.search(r"Each of 4 sessions may have 8,192 tokens at once", printed)
    (bar,) = re.findall(r"^\[(\w+\.*)\]$", printed, re.M)
    assert len(bar) == 72
    assert bar.count("K") > bar.count("d") > 0


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"--model {MODEL} --vram 3GiB --context 262144 --sessions 40"
    assert plan.main(asked.split()) == plan.TOO_LARGE
    printed = capsys.readouterr().out
    assert re.search(r"GiB are needed for 40 sessions of 262,144 tokens, 3\.00 GiB are there: .* too much", printed)
    assert re.search(r"^ \d+ sessions? +[\d.]+ GiB  fits +$", printed, re.M)
    assert re.search(r"^ SAMOVAR_RECIPE=gsq3: weights of [\d,]+ KiB +11 MiB  is too large still +$", printed, re.M)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("--model /nowhere --vram 16GiB", "/nowhere: no such file or folder"),
        (f"--model {MODEL} --vram much", "SAMOVAR_VRAM='much': write a size like 4GiB"),
        (f"--model {MODEL} --vram 16GiB --context 300000", "the model was made for 262144 tokens at most"),
        (f"--model {MODEL} --device cpu", "how much memory is there? Write --vram 16GiB"),
        (f"--model {MODEL} --vram 16GiB --recipe int9", "recipe 'int9' is neither a TOML file nor one of"),
        (f"--model {MODEL} --vram 16GiB --kv-format fp9", "SAMOVAR_KV_FORMAT='fp9': write one of auto, bf16"),
        (f"--model {MODEL} --vram 16GiB --state-dtype fp16", "SAMOVAR_STATE_DTYPE='fp16': write one of float32"),
    ],
)
def test_what_cannot_be_used(asked: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(asked.split()) == plan.UNUSABLE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["--spec mtp:6", "--spec mtp:0", "--spec eagle:3", "--sessions 0"])
def test_wrong_options(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.main(["--model", str(MODEL), *asked.split()])
    assert caught.value.code == 2
    assert "invalid" in capsys.readouterr().err

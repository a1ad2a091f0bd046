"""Our own folders: written from every kind of source, read again, and what is wrong with them."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.linear import weight
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.quantized import FORMATS, dequantize
from kernels.linear.weight import Weight
from services.engine.model.config import ModelError
from services.engine.weights import recipes
from services.engine.weights.artifact import bits, form, manifest, rows
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.codecs import encode
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.readers import open_folder
from services.engine.weights.resolve import resolve
from services.engine.weights.source import DENSE, QuantizedSource
from tests.engine import gguf_files
from tests.engine.tiny_models import oracle
from tests.engine.weights.packing import everything, job, pack
from tests.engine.weights.random_folders import random_folder

MATRIX = re.compile(r"(\w_proj|in_proj_qkv|in_proj_z|embed_tokens|lm_head|fc)\.weight$")


def values(source: QuantizedSource, name: str) -> Tensor:
    target = torch.empty(source.shape(name))
    source.read(name, target)
    return target


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_folder(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 67])
def test_bits(width: int, columns: int) -> None:
    codes = torch.randint(0, 2**width, (5, columns), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    joined = bits.join(codes, width)
    assert joined.shape == (5, columns if width == 8 else -(-columns // 8) * width)
    assert torch.equal(bits.split(joined, width, columns), codes)


def test_bits_are_little_endian_and_dense() -> None:
    """As compressed-tensors packs -4..3, whose words are 88fac688 c688fac6 fac688fa."""
    joined = bits.join(torch.arange(8).repeat(4)[None].to(torch.uint8), 3)
    assert bytes(joined[0].tolist()).hex() == "88c6fa" * 4
    assert bits.join(torch.tensor([[1, 2, 15, 4]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x4F, 0, 0]]


@pytest.mark.parametrize("format", [*FORMATS, *DENSE])
def test_each_format(folder: Path, tmp_path: Path, format: str) -> None:
    source = open_folder(folder)
    written = pack(source, tmp_path / "out", everything(format), shard_bytes=200_000)
    assert len(written.shards) > 1
    packed = ArtifactCheckpoint(tmp_path / "out")
    packed.verify()
    assert packed.config == source.config
    assert packed.names() == source.names()
    assert packed.bundle() == source.bundle()
    for name in source.names():
        assert packed.shape(name) == source.shape(name)
        original = values(source, name)
        if not MATRIX.search(name):
            assert packed.format(name) == source.format(name)
            assert torch.equal(values(packed, name), original)
            continue
        assert packed.format(name) == format
        if format in FORMATS:
            expected = encode(original, format)
            assert torch.equal(values(packed, name), dequantize(expected))
            found = packed.encoded(name, 0, len(original))
            assert torch.equal(found.codes, expected.codes)
        else:
            assert torch.equal(values(packed, name), original.to(form.DTYPES[format]).float())


@pytest.mark.parametrize("format", [*FORMATS, "bf16"])
def test_groups(folder: Path, tmp_path: Path, format: str) -> None:
    """Whole groups, as the kernels read them, and where their parts lie."""
    pack(open_folder(folder), tmp_path / "out", everything(format))
    packed = ArtifactCheckpoint(tmp_path / "out")
    for group, names in {
        "model.layers.3.self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "model.layers.0.linear_attn.in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "mtp.layers.0.mlp.gate_up_proj": ["gate_proj", "up_proj"],
    }.items():
        if format == "fp8-block" and group not in packed.groups():
            assert group.endswith(("qkv_proj", "gate_up_proj"))  # 64 and 192 rows: no whole blocks
            continue
        parts = packed.parts(group)
        assert [part.name.split(".")[-2] for part in parts] == names
        matrix = packed.group(group)
        if isinstance(matrix, Weight):
            whole = dequantize(weight.unpack(matrix))
        else:
            assert isinstance(matrix, Tensor)
            whole = matrix.float()
        assert len(whole) == sum(part.rows for part in parts)
        for part in parts:
            assert torch.equal(whole[part.first : part.first + part.rows], values(packed, part.name))


def test_parts_of_several_formats_stay_apart(folder: Path, tmp_path: Path) -> None:
    text = (
        'description = ""\nrules = [{tensors = ["*.k_proj.*"], format = "int8-g32"}, {tensors = ["*"], format = "fp8"}]'
    )
    pack(open_folder(folder), tmp_path / "out", recipes.parse(text, "mixed"))
    packed = ArtifactCheckpoint(tmp_path / "out")
    assert {"model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj"} <= packed.groups()
    assert "model.layers.3.self_attn.qkv_proj" not in packed.groups()
    assert packed.format("model.layers.3.self_attn.k_proj.weight") == "int8-g32"


@pytest.mark.parametrize("format", ["nvfp4", "int4-g64", "fp8-block"])
def test_experts_in_one_tensor_or_apart(tmp_path: Path, format: str) -> None:
    """The same matrices; nvfp4 has a scale for each expert's."""
    together = random_folder(tmp_path / "together", moe=True)
    apart = random_folder(tmp_path / "apart", moe=True, apart=True)
    for layer in [f"model.layers.{index}" for index in range(4)] + ["mtp.layers.0"]:
        gates_ups = together[f"{layer}.mlp.experts.gate_up_proj"]
        downs = together[f"{layer}.mlp.experts.down_proj"]
        for expert in range(3):
            own = f"{layer}.mlp.experts.{expert}"
            apart[f"{own}.gate_proj.weight"] = gates_ups[expert, :64].clone()
            apart[f"{own}.up_proj.weight"] = gates_ups[expert, 64:].clone()
            apart[f"{own}.down_proj.weight"] = downs[expert].clone()
    save_file(apart, tmp_path / "apart" / "model.safetensors")
    pack(open_folder(tmp_path / "together"), tmp_path / "one", everything(format))
    pack(open_folder(tmp_path / "apart"), tmp_path / "two", everything(format))
    one, two = ArtifactCheckpoint(tmp_path / "one"), ArtifactCheckpoint(tmp_path / "two")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert one.shape(name) == (3, 128, 128)
    if format == "fp8-block":  # 64 rows are no whole block
        assert name not in two.groups()
        return
    assert [part.first for part in two.parts(name)] == [0, 64, 128, 192, 256, 320]
    assert two.shape("model.layers.1.mlp.experts.2.up_proj.weight") == (64, 128)
    downs = "model.layers.1.mlp.experts.down_proj"
    experts = [values(two, f"model.layers.1.mlp.experts.{expert}.down_proj.weight") for expert in range(3)]
    assert torch.equal(values(one, downs), torch.stack(experts))
    assert torch.equal(
        values(one, downs), torch.stack([dequantize(encode(e, format)) for e in together[downs].float()])
    )


def test_keep_changes_nothing(tmp_path: Path) -> None:
    """From a GGUF of several types: no code, no scale; and from our own folder, which comes out the same."""
    types = {
        "blk.0.attn_q.weight": Kind.Q4_0,
        "blk.0.attn_k.weight": Kind.Q4_0,
        "blk.0.attn_v.weight": Kind.Q4_1,
        "blk.1.ffn_up.weight": Kind.Q5_1,
    }
    model = oracle("qwen3", hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4)
    tensors = gguf_files.tensors(model)
    raw = {name: (gguf_files.gguf.quants.quantize(tensors[name], kind), kind) for name, kind in types.items()}
    source = GgufCheckpoint(gguf_files.write(tmp_path / "model.gguf", model, Kind.Q8_0, raw=raw))
    written = pack(source, tmp_path / "out")
    assert all(group.squares is None for group in written.groups)
    packed = ArtifactCheckpoint(tmp_path / "out")
    found = set()
    for name in source.names():
        assert packed.format(name) == source.format(name)
        found.add(source.format(name))
        assert torch.equal(values(packed, name), values(source, name))
        if source.format(name) not in DENSE:
            count = source.shape(name)[0]
            stored, read = source.encoded(name, 0, count), packed.encoded(name, 0, count)
            for one, other in zip(form.tensors(stored), form.tensors(read), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
    assert found == {"grouped", "int8-g32", "float32"}
    assert "model.layers.1.self_attn.qkv_proj" in packed.groups()
    assert "model.layers.0.self_attn.qkv_proj" not in packed.groups()  # Q4_0 and Q4_1
    matrix = packed.group("model.layers.0.self_attn.v_proj")
    assert isinstance(matrix, GroupedWeight)
    unpacked = form.decoded(grouped.unpack(matrix))
    assert torch.equal(unpacked, values(packed, "model.layers.0.self_attn.v_proj.weight"))
    again = pack(packed, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "out")
    assert again.fingerprint == written.fingerprint
    assert packed.bundle() == source.bundle() == ArtifactCheckpoint(tmp_path / "again").bundle()


def test_from_one_format_to_another(folder: Path, tmp_path: Path) -> None:
    """What is encoded are the decoded values; the error is that against them."""
    pack(open_folder(folder), tmp_path / "eight", everything("int8-g32"))
    source = ArtifactCheckpoint(tmp_path / "eight")
    written = pack(source, tmp_path / "four", everything("nvfp4"))
    packed = ArtifactCheckpoint(tmp_path / "four")
    for group in written.groups:
        if group.squares is None:
            assert group.format in DENSE
            continue
        found = torch.cat([values(packed, part.name) for part in group.parts])
        original = torch.cat([values(source, part.name) for part in group.parts])
        expected = torch.cat([dequantize(encode(values(source, part.name), "nvfp4")) for part in group.parts])
        assert torch.equal(found, expected)
        assert group.squares[0] == pytest.approx(float((found - original).square().sum()), rel=1e-3)
        assert group.squares[1] == pytest.approx(float(original.square().sum()), rel=1e-3)


class Stopped(Exception):
    pass


def stop_at(share: float) -> Callable[[float, str], None]:
    def progress(now: float, what: str) -> None:
        if now >= share:
            raise Stopped

    return progress


@pytest.mark.parametrize("share", [0.0, 0.3, 0.84, 0.9, 0.99])
def test_goes_on_where_it_was(folder: Path, tmp_path: Path, share: float) -> None:
    recipe = everything("int4-g64")
    expected = pack(open_folder(folder), tmp_path / "whole", recipe, 200_000)
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        job(open_folder(folder), out, recipe, 200_000).run(stop_at(share))
    with pytest.raises(ModelError, match="pack that was not finished: run the same `samovar pack` again"):
        resolve(str(out))
    with (out / "packing.jsonl").open("ab") as journal:
        journal.write(b'{"group":"model.la')  # the last line of a killed process
    seen: list[float] = []
    again = job(open_folder(folder), out, recipe, 200_000).run(lambda now, what: seen.append(now))
    assert seen[0] >= min(share, 0.84) * 0.9  # all but the group that was not finished
    assert seen == sorted(seen)
    assert again.fingerprint == expected.fingerprint
    assert content(out) == content(tmp_path / "whole")
    assert not (out / "packing.jsonl").exists()
    assert resolve(str(out)).kind == "artifact"


_KILLED = """
import os, signal, sys, torch
from pathlib import Path
from services.engine.weights.readers import open_folder
from tests.engine.weights.packing import everything, job
torch.set_num_threads(1)
def progress(share, what):
    if share > 0.4:
        os.kill(os.getpid(), signal.SIGKILL)
job(open_folder(Path(sys.argv[1])), Path(sys.argv[2]), everything("nvfp4"), 200_000).run(progress)
"""


def test_goes_on_after_a_kill(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = subprocess.run([sys.executable, "-c", _KILLED, str(folder), str(out)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (out / "samovar.json").exists()
    seen: list[float] = []
    job(open_folder(folder), out, everything("nvfp4"), 200_000).run(lambda now, what: seen.append(now))
    assert seen[0] > 0.3
    pack(open_folder(folder), tmp_path / "whole", everything("nvfp4"), 200_000)
    assert content(out) == content(tmp_path / "whole")


def test_what_does_not_read_back_is_found(folder: Path, tmp_path: Path) -> None:
    """A disk that forgets: some bytes change between writing and reading again."""
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        job(open_folder(folder), out, everything("fp8")).run(stop_at(0.84))
    path = next(out.glob("*.safetensors"))
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"\x01\x02\x03")
        # What was written last is written anew; flip something older.
        file.seek(path.stat().st_size // 2)
        file.write(b"\x01\x02\x03")
    with pytest.raises(ModelError, match="does not read back as it was written"):
        pack(open_folder(folder), out, everything("fp8"))
    assert not (out / "samovar.json").exists()


def test_folders_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    source, out = open_folder(folder), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    with pytest.raises(ModelError, match="is not empty"):
        pack(source, out)
    with pytest.raises(ModelError, match="cannot be made"):
        pack(source, out / "notes.txt")
    (out / "notes.txt").unlink()
    with pytest.raises(Stopped):
        job(source, out, everything("fp8")).run(stop_at(0.3))
    with pytest.raises(ModelError, match="unfinished pack of another source or recipe"):
        pack(source, out, everything("nvfp4"))
    pack(source, out, everything("fp8"))
    with pytest.raises(ModelError, match="holds a packed model already"):
        pack(source, out, everything("fp8"))


def test_the_disk_is_full(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is computed."""

    def allocate(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(ModelError, match="has no room for the packed model: No space left on device"):
        pack(open_folder(folder), tmp_path / "out", everything("fp8"))


def test_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    source, out = open_folder(folder), tmp_path / "out"

    def meanwhile(share: float, what: str) -> None:
        if 0.2 < share < 0.3:
            with pytest.raises(ModelError, match="another process is packing into this folder"):
                pack(source, out, everything("fp8"))

    job(source, out, everything("fp8")).run(meanwhile)


@pytest.mark.parametrize("format", ["fp8", "bf16", "keep"])
def test_values_that_are_not_finite(tmp_path: Path, format: str) -> None:
    weights = random_folder(tmp_path / "source")
    name = "model.layers.2.linear_attn.out_proj.weight"
    weights[name][3, 5] = float("nan")
    save_file(weights, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {name} of model\.safetensors holds values that are not finite"):
        pack(open_folder(tmp_path / "source"), tmp_path / "out", everything(format))


def test_values_too_large_for_the_format(tmp_path: Path) -> None:
    weights = random_folder(tmp_path / "source")
    name = "model.layers.2.linear_attn.out_proj.weight"
    weights[name][3, 5] = 1e6
    save_file(weights, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {name} .*not finite in torch\.float16"):
        pack(open_folder(tmp_path / "source"), tmp_path / "out", everything("float16"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / manifest.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack(open_folder(folder), tmp_path / "out", everything("int5-g64"), 200_000)
    return tmp_path / "out"


def test_newer_damaged_and_unknown(packed: Path) -> None:
    original = (packed / manifest.FILE).read_text()
    groups = json.loads(original)["groups"]
    for changes, message in (
        ({"version": 2, "groups": "in another way"}, "is of version 2; this Samovar reads up to version 1: update"),
        ({"groups": [{**groups[0], "format": "int2-g32"}]}, "has the format 'int2-g32'; known: fp8, "),
        ({"groups": [{**groups[0], "shard": 99}]}, "is damaged"),
        ({"groups": 3}, r"is damaged: Expected `array`"),
        ({"family": "sparse"}, "family 'sparse' is unknown; known: dense, hybrid"),
        ({"config": {"architecture": "qwen3_5"}}, "config: Object missing required field"),
    ):
        edit(packed, **changes)
        with pytest.raises(ModelError, match=message):
            ArtifactCheckpoint(packed)
        (packed / manifest.FILE).write_text(original)
    (packed / manifest.FILE).write_text(original[:-20])
    with pytest.raises(ModelError, match=r"samovar\.json is damaged"):
        ArtifactCheckpoint(packed)


def test_truncated_missing_and_changed_files(packed: Path) -> None:
    path = sorted(packed.glob("*.safetensors"))[1]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        ModelError, match=rf"{path.name} has {len(content) - 1} bytes; expected {len(content)}: it is trunc"
    ):
        ArtifactCheckpoint(packed)
    path.unlink()
    with pytest.raises(ModelError, match=rf"{path.name} is missing"):
        ArtifactCheckpoint(packed)
    path.write_bytes(b"\xff" * len(content))
    with pytest.raises(ModelError, match="its header cannot be read"):
        ArtifactCheckpoint(packed)
    path.write_bytes(content[:-9] + b"\x00\x01" + content[-7:])
    with pytest.raises(ModelError, match=rf"{path.name} is damaged: its checksum differs"):
        ArtifactCheckpoint(packed).verify()
    path.write_bytes(content)
    ArtifactCheckpoint(packed).verify()
    (packed / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        ArtifactCheckpoint(packed).bundle()


def test_shards_are_plain_safetensors(packed: Path) -> None:
    """Another reader finds the same tensors."""
    path = min(packed.glob("*.safetensors"))
    tensors = load_file(path)
    checkpoint = ArtifactCheckpoint(packed)
    name = "model.embed_tokens.weight" if "model.embed_tokens.codes" in tensors else "lm_head.weight"
    found = checkpoint.encoded(name, 0, 160)
    key = name.removesuffix(".weight")
    assert torch.equal(form.stored(found)["codes"], tensors[f"{key}.codes"])
    assert torch.equal(form.stored(found)["scales"], tensors[f"{key}.scales"])


_MEASURED = """
import sys, threading, torch
from pathlib import Path
from services.engine.weights.artifact import rows
from services.engine.weights.readers import open_folder
from tests.engine.weights.packing import everything, job
torch.set_num_threads(1)
rows.PIECE_ELEMENTS["cpu"] = 2**18
small, large, out = map(Path, sys.argv[1:])
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
def pack(folder):
    job(open_folder(folder), out / folder.name, everything("fp8")).run(lambda share, what: None)
pack(small)  # what torch keeps of its first operations
before, peak, done = resident(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident())
watcher = threading.Thread(target=watch)
watcher.start()
pack(large)
done.set()
watcher.join()
print((peak - before) // 1024)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    """90 MB of weights, 6.3 MB the largest tensor, pieces of 1 MiB in float32."""
    random_folder(tmp_path / "small")
    random_folder(tmp_path / "large", vocab_size=4096, hidden_size=768, intermediate_size=3072)
    assert (tmp_path / "large" / "model.safetensors").stat().st_size > 85e6
    command = [sys.executable, "-c", _MEASURED, *(str(tmp_path / name) for name in ("small", "large", "out"))]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 <= int(child.stdout) < 40, f"{child.stdout} MiB"


def test_pieces_cover_all_rows() -> None:
    for count, columns in ((1, 5120), (256, 100), (257, 2**20), (248_320, 5120)):
        ranges = form.pieces(count, columns, rows.PIECE_ELEMENTS["cpu"])
        assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
        assert ranges[-1][1] == count
        assert all(first % 256 == 0 for first, _ in ranges)

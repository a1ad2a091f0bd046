"""What the scheduler must know of model, device and settings."""

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 2:
            raise ValueError(f"max_batch_tokens is {self.max_batch_tokens}: at least 2 are needed")
        if self.max_running < 1 or self.max_model_len < 1:
            raise ValueError("max_running and max_model_len must be at least 1")

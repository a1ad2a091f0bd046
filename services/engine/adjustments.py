"""What the requests that run do to their logits: penalties and bias, kept on the device from step to step."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import Adjustment, cells_of
from services.engine.batch import SampleSpec
from services.protocol.generate import SamplingParams


@dataclass(slots=True)
class _Kept:
    params: SamplingParams
    prompt: int
    """Its length."""
    length: int
    """Tokens of the answer that are known to be counted in the cells."""
    last: int
    """The last of them; -1: there is none."""
    adjustment: Adjustment

    def fits(self, spec: SampleSpec) -> bool:
        return (
            self.params == spec.params
            and self.prompt == len(spec.prompt)
            and self.length == len(spec.output)
            and self.last == _last(spec)
        )


class Adjustments:
    """By request id, those used last: 2 bytes a token of the vocabulary for a request with penalties, nothing for one
    without penalties or bias."""

    def __init__(self, vocab_size: int, requests: int, device: torch.device) -> None:
        """requests: kept at most; not less than the rows of a step."""
        self._vocab_size = vocab_size
        self._requests = requests
        self._device = device
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def of(self, request_id: str, spec: SampleSpec) -> Adjustment | None:
        """None where nothing is adjusted. Made anew where what is kept is of another answer than `spec.output`: for a
        request that is new or comes back, or whose answer went on with tokens that were not drawn here."""
        params = spec.params
        if not (_penalized(params) or params.logit_bias):
            return None
        kept = self._kept.get(request_id)
        if kept is None or not kept.fits(spec):
            kept = _Kept(params, len(spec.prompt), len(spec.output), _last(spec), self._made(spec))
            self._kept[request_id] = kept
        self._kept.move_to_end(request_id)
        while len(self._kept) > self._requests:
            self._kept.popitem(last=False)
        return kept.adjustment

    def drawn(self, request_id: str, token: int) -> None:
        """The device has counted `token`."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.length += 1
            kept.last = token

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._kept)

    def _made(self, spec: SampleSpec) -> Adjustment:
        params = spec.params
        cells = cells_of(spec.prompt, spec.output, self._vocab_size, self._device) if _penalized(params) else None
        ids, values = self._bias(params)
        return Adjustment(
            cells, params.repetition_penalty, params.presence_penalty, params.frequency_penalty, ids, values
        )

    def _bias(self, params: SamplingParams) -> tuple[Tensor | None, Tensor | None]:
        """Ids that the vocabulary does not have are ignored: nothing could be drawn there."""
        known = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < self._vocab_size}
        if not known:
            return None, None
        ids = torch.tensor(list(known), dtype=torch.int64)
        return ids.to(self._device), torch.tensor(list(known.values()), dtype=torch.float32).to(self._device)


def _penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _last(spec: SampleSpec) -> int:
    return spec.output[-1] if spec.output else -1

"""``megatron-grpo bench gap``: what each codec would cost a real model, without training it.

The model samples its own texts; codecs are fitted on some prompts and measured on others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.backends.huggingface import CausalModel, Tokenizer, load_causal_model, load_tokenizer
from megatron_grpo.bench.arms import BACKWARD_ARMS, FORWARD_ARMS, Arm, fitted_codecs
from megatron_grpo.bench.backward import RetainedPasses, boundary_gradients, with_random_advantages
from megatron_grpo.bench.forward import DenseReference, forward_row, limit_rows, rollout_gap
from megatron_grpo.bench.prompts import built_in_prompts, file_prompts
from megatron_grpo.bench.spectra import backward_spectrum, forward_spectrum
from megatron_grpo.bench.texts import Rowbook, SplitModel
from megatron_grpo.config import ConfigError, layer_split
from megatron_grpo.config.checks import budget_errors
from megatron_grpo.rollout.batch import Batch
from megatron_grpo.rollout.sampler import SamplingRule

ROLLOUT_PROMPTS = 8
ROLLOUT_RESPONSE = 16
GRADIENT_PART = 4
"""One of so many texts to fit on is passed backward, too."""

Note = Callable[[str], None]
"""Told what was just done, :func:`pieces_of_work` times."""


@dataclass(frozen=True, slots=True)
class GapSettings:
    """What is measured on.

    Attributes:
        shares: byte shares of a bfloat16 crossing.
        texts: measured on; a multiple of ``group``.
        fit_texts: fitted on, of other prompts; a multiple of ``group``.
        group: answers to one prompt.
        max_response: tokens.
        micro_batch: sequences that cross together; token_waterfill shares its bytes out among them.
        prompts: a file of JSON lines; ``None``: built in.
    """

    shares: tuple[float, ...]
    texts: int = 16
    fit_texts: int = 128
    group: int = 2
    max_response: int = 64
    micro_batch: int = 32
    seed: int = 0
    prompts: Path | None = None

    def check(self) -> None:
        """Raises ConfigError on numbers that cannot be measured with."""
        for share in self.shares:
            if not 0.0 < share <= 1.0:
                raise ConfigError(
                    f"--bytes={share}: must be above 0 and at most 1; it is a share of a bfloat16 crossing"
                )
        for name, count in (("texts", self.texts), ("fit-texts", self.fit_texts)):
            if count < self.group or count % self.group:
                raise ConfigError(f"--{name}={count}: must be a multiple of the {self.group} answers to a prompt")
        if self.max_response < 2:
            raise ConfigError(f"--max-response={self.max_response}: leaves nothing to measure; use at least 2")


def pieces_of_work(shares: int) -> int:
    """How often ``note`` is called for so many shares."""
    arms = [*FORWARD_ARMS, *BACKWARD_ARMS]
    return 4 + sum(shares if arm.sized else 1 for arm in arms) + 2


def run_gap(
    model_dir: Path,
    boundaries: int,
    shares: Sequence[float],
    *,
    after: Sequence[int] | None = None,
    settings: GapSettings | None = None,
    device: str = "auto",
    note: Note = lambda done: None,
) -> dict[str, Any]:
    """Measure every codec on the model of a Hugging Face directory. The result's keys are ``report.KEYS``.

    Args:
        boundaries: cuts, placed as the pipeline places its stages; ``after`` comes first where it is given.
        shares: of the bytes of a bfloat16 crossing.
        after: layers (counted from 1) that have a boundary behind them.
        device: of torch; auto: the GPU where there is one.

    Raises:
        ConfigError: the directory holds no model, or a number does not fit it.
    """
    settings = replace(settings or GapSettings(shares=()), shares=tuple(shares))
    settings.check()
    started = time.monotonic()
    model, tokenizer = load_causal_model(model_dir, _place(device)), load_tokenizer(model_dir)
    split = SplitModel(model, _cuts(len(model.layers), boundaries, after))
    for arm, share in product((*FORWARD_ARMS, *BACKWARD_ARMS), shares):
        for error in budget_errors(arm.config(share, model.hidden), model.hidden):
            raise ConfigError(f"--bytes={share}: {error}")
    bench = _Bench(split, tokenizer, settings, note)
    result = {
        "model": str(model_dir),
        "layers": len(model.layers),
        "hidden": model.hidden,
        "after": list(split.after),
        "settings": asdict(settings) | {"prompts": settings.prompts and str(settings.prompts)},
        **bench.measure(),
    }
    return result | {"seconds": time.monotonic() - started}


def _place(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"--device={device}: {str(error).splitlines()[0]}; use cpu, or leave it out") from error


def _cuts(layers: int, boundaries: int, after: Sequence[int] | None) -> tuple[int, ...]:
    """Layer counts before each boundary."""
    if after is not None:
        if list(after) != sorted(set(after)) or not after or after[0] < 1 or after[-1] >= layers:
            given = ",".join(map(str, after))
            raise ConfigError(
                f"--after={given}: must rise from 1 to {layers - 1} at most: the model has {layers} layers"
            )
        return tuple(after)
    if not 1 <= boundaries < layers:
        raise ConfigError(f"--boundaries={boundaries}: the model has {layers} layers; use 1 to {layers - 1}")
    stages = layer_split(layers, boundaries + 1)
    return tuple(sum(stages[: index + 1]) for index in range(boundaries))


class _Bench:
    """One measurement, in order."""

    def __init__(self, split: SplitModel, tokenizer: Tokenizer, settings: GapSettings, note: Note) -> None:
        self._split, self._settings, self._note = split, settings, note
        self._rule = SamplingRule(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_response=settings.max_response,
            valid=split.model.vocabulary,
            end_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            seed=settings.seed,
        )
        wanted = (settings.texts + settings.fit_texts) // settings.group
        file = settings.prompts
        texts = built_in_prompts(wanted, settings.seed) if file is None else file_prompts(file, wanted)
        prompts = [tokenizer.encode_chat(text) for text in texts]
        self._test_prompts = prompts[: settings.texts // settings.group]
        self._fit_prompts = prompts[settings.texts // settings.group :]

    @property
    def _model(self) -> CausalModel:
        return self._split.model

    def measure(self) -> dict[str, Any]:
        test, fit = self._texts(self._test_prompts, 0), self._texts(self._fit_prompts, 1)
        seen = Rowbook(len(self._split.after))
        with torch.no_grad():
            for batch in fit:
                self._split.response_logits(batch, seen)
        reference = DenseReference(self._split, test)
        self._note("activations of the texts to fit on")
        gradients = boundary_gradients(self._split, fit[: max(len(test), len(fit) // GRADIENT_PART)])
        self._note("gradients of the texts to fit on")
        forward = [row for arm in FORWARD_ARMS for row in self._forward(reference, seen, gradients, arm)]
        limits = self._limits(reference, seen)
        passes = RetainedPasses(self._split, test)
        backward = [row for arm in BACKWARD_ARMS for row in self._backward(passes, gradients, arm)]
        return {
            "tokens": {"fit": _rows(fit), "test": _rows(test), "test_response": sum(b.response_tokens for b in test)},
            "spectra": [
                {"forward": forward_spectrum(seen.rows_NH(i)), "backward": backward_spectrum(gradients.rows_NH(i))}
                for i in range(len(self._split.after))
            ],
            "forward": forward,
            "limits": limits,
            "backward": backward,
        }

    def _texts(self, prompts: Sequence[Sequence[int]], number: int) -> list[Batch]:
        """Micro-batches of answers, the answers to one prompt side by side."""
        settings = self._settings
        repeated = [prompt for prompt in prompts for _ in range(settings.group)]
        batch = self._split.sample(repeated, replace(self._rule, seed=settings.seed + number))
        self._note(f"{len(batch)} texts sampled")
        return with_random_advantages(batch, settings.group, settings.seed + number).split(settings.micro_batch)

    def _shares(self, arm: Arm) -> Sequence[float | None]:
        return self._settings.shares if arm.sized else (None,)

    def _forward(
        self, reference: DenseReference, seen: Rowbook, gradients: Rowbook, arm: Arm
    ) -> Iterator[dict[str, Any]]:
        rule = replace(self._rule, max_response=min(ROLLOUT_RESPONSE, self._rule.max_response))
        fitted = fitted_codecs(
            arm,
            self._shares(arm),
            seen,
            seed=self._settings.seed,
            embedding_VH=self._model.embedding_VH,
            gradients=gradients,
        )
        for share, codecs in fitted:
            row = forward_row(reference, codecs)
            row |= rollout_gap(self._split, self._test_prompts[:ROLLOUT_PROMPTS], rule, codecs)
            self._note(f"forward {arm.name}")
            yield {"codec": arm.name, "share": share, **row}

    def _limits(self, reference: DenseReference, seen: Rowbook) -> list[dict[str, Any]]:
        rows = []
        for embedding_VH in (None, self._model.embedding_VH):
            rows += limit_rows(
                reference, seen, self._settings.shares, embedding_VH=embedding_VH, seed=self._settings.seed
            )
            self._note("rate-distortion limit")
        return rows

    def _backward(self, passes: RetainedPasses, gradients: Rowbook, arm: Arm) -> Iterator[dict[str, Any]]:
        seed, embedding_VH = self._settings.seed, self._model.embedding_VH
        for share, codecs in fitted_codecs(arm, self._shares(arm), gradients, seed=seed, embedding_VH=embedding_VH):
            row = passes.row(codecs)
            self._note(f"backward {arm.name}")
            yield {"codec": arm.name, "share": share, **row}


def _rows(batches: Sequence[Batch]) -> int:
    return sum(int(batch.carrying_BT().sum()) for batch in batches)

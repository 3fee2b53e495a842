"""One frozen pydantic model per component. Unknown keys, wrong types and wrong ranges are refused.

Counts are integers, times are seconds, lengths are tokens. A step is one rollout batch, a tick one optimizer
step.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
Codec = Literal["identity", "lowrank", "mask", "token_waterfill"]
Prediction = Literal["none", "embedding", "embedding+previous"]
Payload = Literal["float32", "bfloat16", "int8", "int4", "int3", "waterfill"]
Link = Literal["pipeline", "tensor", "data"]

DEFAULT_RANK = 5
BACKWARD_BUDGET = 0.015
"""Without any, and what auto starts from."""
TENSOR_SHARE = 4
"""Hidden size over the rank of the tensor link, by default: it is crossed twice a layer, not once a stage."""
DATA_RANK = 8
DATA_WARMUP = 10


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    path: str
    """Hugging Face directory of the policy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of weights and activations; the engine keeps float32 masters."""
    recompute: bool = False
    """Recompute activations in the backward pass (Megatron's full recomputation)."""


class TokenizerConfig(Section):
    path: str | None = None
    """Directory of the tokenizer; model.path when absent."""


class ParallelConfig(Section):
    tensor: Positive = 1
    """Ranks that share one stage."""
    pipeline: Positive = 2
    """Policy stages."""
    data: Positive = 1
    """Replicas of the pipeline."""
    placement: Literal["ranks", "one_process"] = "ranks"
    """one_process: all stages in one process, through the same codecs; for studies on one device."""
    reward_stage: bool = False
    """One more stage, behind the policy's: it scores finished micro-batches while the policy samples the next ones."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait on any link, in seconds."""
    threads: Positive = 1
    """CPU threads of one rank."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl where there is a GPU, gloo elsewhere."""
    interface: str | None = None
    """Network interface that ranks talk through, on every host; the libraries choose one when absent."""


class BoundaryConfig(Section):
    codec: Codec | None = None
    """Shorthand for forward_codec and backward_codec; without any, lowrank forward and token_waterfill backward."""
    forward_codec: Codec | None = None
    backward_codec: Codec | None = None
    rank: Positive | None = None
    """Columns of the basis (lowrank) or coordinates of a token (mask), 5 when absent; payload waterfill keeps as many
    as it has bits for."""
    payload: Payload | None = None
    """Number format on the wire; shorthand for forward_payload and backward_payload. Without any, waterfill forward
    where the codec is left out as well, and bfloat16 elsewhere."""
    forward_payload: Payload | None = None
    backward_payload: Payload | None = None
    budget: Share | None = None
    """Bytes of a crossing as a share of bfloat16, for payload waterfill and codec token_waterfill; shorthand. Without
    any, 0.06 forward and 0.015 backward."""
    forward_budget: Share | None = None
    backward_budget: float | Literal["auto"] | None = None
    """auto: the smallest that holds backward_cosine, as last checked."""
    backward_cosine: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """With auto: of the gradient of every stage's layers with the one under an uncompressed backward pass, at least."""
    backward_check: Positive = 64
    """With auto: steps between checks, each one uncompressed backward pass and a few coded ones over a minibatch."""
    basis: Literal["anchor", "self", "random"] = "self"
    """anchor: learns from every uncompressed pass; self: the sender learns from its own tensors; random: the first one
    is kept."""
    refresh_steps: Positive = 16
    """Steps between refreshes of basis self, and between measurements of the gap for rollout.path auto. Before the
    first, a basis is refreshed after 2, 4, 8 ... steps."""
    calibration: Positive = 32
    """Sequences sampled uncompressed before the first step, for the first basis of basis self."""
    predict: Prediction | None = None
    """What packed forward rows are predicted from, so that only the rest is coded; embedding+previous with payload
    waterfill, none elsewhere, when absent."""
    weighting: Literal["energy", "rows"] | None = None
    """Whether a basis is fitted on rows as they are or on normalised ones; energy with float payloads when absent."""
    metric: Literal["gradient", "none"] = "gradient"
    """What an error of packed forward rows counts: by the gradients that come back for them, or alike everywhere."""
    commit: Literal["step", "tick"] = "step"
    """When a new basis comes into force; tick is a control that changes it inside a step."""
    dense_every: Natural = 0
    """Ticks between uncompressed ticks without an anchor; 0: none."""
    error_feedback: bool | None = None
    """Backward rows carry what the micro-batch before lost at the same places; when absent, with token_waterfill."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Of backward codes, but for payload waterfill; stochastic is unbiased."""
    send_once: Literal["off", "reuse", "delta"] = "off"
    """Rows that crossed while a rollout was sampled serve every pass over it that is forward in the pipeline: reuse, as
    they are; delta, with what they have moved since where that is more than delta_tolerance."""
    cache_place: Literal["device", "host", "disk"] = "device"
    """Where send_once keeps rows, at both ends of a boundary."""
    cache_gib: PositiveFloat | None = None
    """Most that one end of a boundary keeps of a rollout; what does not fit crosses again. null: all."""
    delta_tolerance: NonNegativeFloat = 0.01
    """Drift, as a share of the rows' norm, above which delta sends: that of the same minibatch a step before."""
    delta_budget: Share = 0.02
    """Bytes of such a difference as a share of bfloat16."""
    anchor_budget: Share | None = None
    """Bytes of an anchor's gradients as a share of bfloat16, by token_waterfill; null: they cross uncompressed."""
    links: Annotated[tuple[Link, ...], Field(strict=False)] = ("pipeline",)
    """Links that are compressed: boundaries between stages; sums over the tensor ranks of a layer; gradients of weight
    matrices over the replicas. The codecs, payloads and budgets above are the pipeline's."""
    tensor_rank: Positive | None = None
    """Columns of the bases of the tensor link; a quarter of the hidden size when absent."""
    data_rank: Positive | None = None
    """Rank of the gradients that cross the data link, 8 when absent; a matrix that it would not halve crosses whole."""
    data_warmup: Natural | None = None
    """Ticks before gradients are compressed, 10 when absent."""
    shared_basis: bool = False
    """One basis for activations and gradients instead of two."""

    @field_validator("links")
    @classmethod
    def _some_link(cls, value: tuple[Link, ...]) -> tuple[Link, ...]:
        if not value:
            raise ValueError("is empty; name at least one")
        return value

    @field_validator("backward_budget", mode="plain")
    @classmethod
    def _share_or_auto(cls, value: object) -> object:
        """By hand, so that what is neither is one error and not one of each."""
        if value is None or value == "auto":
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        raise ValueError("is neither auto nor a share above 0 and at most 1; use one of them (default null)")

    @field_validator("send_once", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @property
    def cache_limit(self) -> int | None:
        """``cache_gib`` in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    def codec_of(self, direction: Direction) -> Codec:
        """The codec of one direction of a pipeline boundary, the shorthand resolved."""
        if "pipeline" not in self.links:
            return "identity"
        default: Codec = "lowrank" if direction == "forward" else "token_waterfill"
        return (self.forward_codec if direction == "forward" else self.backward_codec) or self.codec or default

    def payload_of(self, direction: Direction) -> Payload:
        """The number format of one direction, the shorthand resolved."""
        packs = (
            direction == "forward" and self.codec is None and self.forward_codec is None and "pipeline" in self.links
        )
        default: Payload = "waterfill" if packs else "bfloat16"
        return (self.forward_payload if direction == "forward" else self.backward_payload) or self.payload or default

    def budget_of(self, direction: Direction) -> float:
        """The byte budget of one direction as a share of a bfloat16 crossing, the shorthand resolved; of auto, the
        one it starts from."""
        if direction == "forward":
            return self.forward_budget or self.budget or 0.06
        if self.backward_budget == "auto":
            return BACKWARD_BUDGET
        return self.backward_budget or self.budget or BACKWARD_BUDGET

    @property
    def budgets_itself(self) -> bool:
        """Whether the backward budget is chosen as the run goes."""
        return self.backward_budget == "auto"

    def rank_of(self, hidden: int) -> int:
        """Columns of the basis, or coordinates of a token."""
        return min(DEFAULT_RANK, hidden) if self.rank is None else self.rank

    def tensor_rank_of(self, hidden: int) -> int:
        """Columns of the bases of the tensor link."""
        return max(1, hidden // TENSOR_SHARE) if self.tensor_rank is None else self.tensor_rank

    @property
    def gradient_rank(self) -> int:
        """``data_rank``, the default resolved."""
        return DATA_RANK if self.data_rank is None else self.data_rank

    @property
    def gradient_warmup(self) -> int:
        """``data_warmup``, the default resolved."""
        return DATA_WARMUP if self.data_warmup is None else self.data_warmup

    def packed(self, direction: Direction) -> bool:
        """Whether rows cross as packed codes of a fitted transform or whitened basis."""
        return self.codec_of(direction) == "lowrank" and self.payload_of(direction) not in ("float32", "bfloat16")

    def resolved(self) -> "BoundaryConfig":
        """The same with what is left out written down, direction by direction: later defaults do not change it."""
        by_direction: dict[str, object] = {}
        for way in DIRECTIONS:
            by_direction |= {
                f"{way}_codec": self.codec_of(way),
                f"{way}_payload": self.payload_of(way),
                f"{way}_budget": self.budget_of(way),
            }
        if self.budgets_itself:
            by_direction["backward_budget"] = "auto"
        shorthand = dict.fromkeys(("codec", "payload", "budget"))
        if "data" in self.links:
            by_direction |= {"data_rank": self.gradient_rank, "data_warmup": self.gradient_warmup}
        return self.model_copy(
            update=shorthand | by_direction | {"predict": self.prediction, "error_feedback": self.feeds_back}
        )

    @property
    def prediction(self) -> Prediction:
        """``predict``, the default resolved."""
        if self.predict is not None:
            return self.predict
        waterfill = self.packed("forward") and self.payload_of("forward") == "waterfill"
        return "embedding+previous" if waterfill else "none"

    @property
    def feeds_back(self) -> bool:
        """``error_feedback``, the default resolved."""
        if self.error_feedback is not None:
            return self.error_feedback
        return self.codec_of("backward") == "token_waterfill"

    def dense_payload(self, direction: Direction) -> Literal["float32", "bfloat16"]:
        """The number format of an uncompressed crossing: bfloat16 unless the payload is float32."""
        return "float32" if self.payload_of(direction) == "float32" else "bfloat16"


class AnchorConfig(Section):
    enabled: bool = False
    cadence: Positive = 5
    """Ticks between anchor passes."""
    delay: Natural = 5
    """Age, in ticks, of the anchor's weights and samples when it fires."""
    beta: BelowOne = 0.5
    """M <- beta*M + (1-beta)*g_anchor."""
    bootstrap: Literal["random", "dense"] = "random"
    """The basis before the first refresh: random, or fitted in one uncompressed tick."""
    place: Literal["device", "cpu"] = "device"
    """Where M, snapshots and what else the anchor remembers between ticks lie; cpu: in host memory, pinned on a machine
    with GPUs. Packed signs stay on the device."""
    alarm: Literal["off", "warn", "adapt", "stop"] = "warn"
    """What happens when the run looks like collapsing: a note, less weight for M, or the end of the run."""

    @field_validator("alarm", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value


class MergerConfig(Section):
    kind: Literal["none", "signed_ema", "delayed_ef"] = "signed_ema"
    alpha: Fraction = 0.82
    """signed_ema: weight of the fast gradient; the source's is 0.25."""
    lam: NonNegativeFloat = 1.0
    """delayed_ef: weight of the correction."""
    decay: Share = 1.0
    """M's weight is multiplied by this at every tick since it arrived; 1: held at full weight."""
    hold: Natural = 0
    """Ticks for which M is used after it arrived; 0: until the next one."""
    gate: Literal["none", "cosine", "agreement"] = "none"
    """cosine: M is used while its cosine with the mean fast gradient is above gate_threshold; agreement: element by
    element, where their signs agree."""
    gate_threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.0
    packed_signs: bool = False
    """signed_ema: keep M as one bit an element."""


class GrpoConfig(Section):
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses to one prompt."""
    prompts_per_step: Positive = 16
    """Prompts of one step, over all data-parallel ranks."""
    minibatches: Positive = 2
    """Ticks in one step."""
    dead_groups: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rewards do not differ, by the rewards before any term of length. keep: they count in the loss's
    denominators, its KL and its entropy; drop: in nothing; resample: other prompts take their place, up to
    resample_rounds times, and what is dead even then is dropped."""
    resample_rounds: Positive = 3
    """Times that the dead groups of a step are sampled anew, at most."""
    objective: Literal["clip", "gspo", "cispo"] = "clip"
    """PPO's clipped surrogate token by token; under one ratio a sequence; or log-probs weighted by a bounded ratio."""
    clip_low: BelowOne = 0.2
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; cispo has no lower bound."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound of the ratio where the advantage is negative; null turns it off. cispo has none."""
    log_ratio_clamp: PositiveFloat = 20.0
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference policy; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k3 is unbiased and never negative; k2 has the divergence's gradient; k1 as a loss only adds noise."""
    entropy_coef: NonNegativeFloat = 0.0
    baseline: Literal["group", "leave_one_out"] = "group"
    """Advantages are differences from the mean of the group, or of the other samples in it; so is their deviation."""
    std: Literal["sample", "none"] = "sample"
    """Advantages are divided by that sample deviation, or not."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = "token_mean"
    """Loss over tokens; mean over sequences of their tokens' mean, of their sum, of their sum over max_response."""
    is_cap: PositiveFloat | None = None
    """Largest importance weight trainer/sampler; null: no weights."""
    is_floor: NonNegativeFloat = 0.0
    """Smallest importance weight."""
    is_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Weights of tokens or whole sequences; those out of bounds are set to the bound, or drop their tokens."""
    eps: PositiveFloat = 1e-6
    """Added to the deviation."""


class RolloutConfig(Section):
    max_response: Positive = 28
    """Longest response, in tokens."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """1 is off."""
    top_k: Natural = 0
    """0 is off."""
    path: Literal["dense", "codec", "auto"] = "auto"
    """Whether the boundaries are compressed while sampling; auto: where the measured gap is at most gap_limit."""
    gap_limit: PositiveFloat = 0.1
    """Mean difference of a token's log-prob between dense and coded boundaries, in nats, up to which auto samples
    through the codec."""
    gather: Literal["auto", "once", "layer"] = "auto"
    """How a ZeRO 3 stage comes by its weights for sampling: once for the whole rollout, or layer by layer at every
    token; auto: once where it fits into half of what memory is free."""
    in_flight: Positive | None = None
    """Micro-batches under way at once; parallel.pipeline when absent."""
    micro_batches: Positive | None = None
    """Micro-batches that a replica's sequences are sampled in; in_flight when absent. Of more, a finished one makes
    room for the next, and a reward stage scores it meanwhile."""


class OptimConfig(Section):
    """AdamW. Overrides what the DeepSpeed file leaves at "auto"."""

    lr: NonNegativeFloat = 5e-5
    warmup_ticks: Natural = 5
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat = 1.0
    """Bound of the global gradient norm."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: PositiveFloat = 1e-8


class DeepSpeedConfig(Section):
    config: str = "deepspeed_configs/zero1.json"
    """DeepSpeed's own JSON file."""


class TrainConfig(Section):
    """Counts steps, except micro_batch."""

    steps: Positive = 70
    micro_batch: Positive = 32
    """Sequences that go through the pipeline together."""
    eval_every: Positive = 5
    save_every: Positive = 35
    keep: Positive = 2
    """Checkpoints that stay on disk."""
    seed: Natural = 0
    stop_gap: PositiveFloat | None = None
    """Limits that end the run after the step, with a checkpoint and exit code 3; null: none. This one: the mean
    |trainer - sampler| log-prob of a step, nats."""
    stop_grad_norm: PositiveFloat | None = None
    """Gradient norm of a tick, before clipping."""
    stop_skipped: Positive | None = None
    """Ticks in a row whose loss or gradient is not finite."""
    stop_length_growth: Annotated[float, Field(gt=1.0)] | None = None
    """Mean response length of a step over that of the first."""


class LoggingConfig(Section):
    tensorboard: bool = True
    wandb: bool = False
    timeline: bool = False
    """Every rank notes when it sampled and scored, in timeline/ of the run directory."""

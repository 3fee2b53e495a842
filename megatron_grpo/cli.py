"""The command line. Importing it loads neither torch nor an engine."""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from megatron_grpo.config import Config, ConfigError, check_config, holds_sizes_alone, load_config

if TYPE_CHECKING:
    from megatron_grpo.launch.hosts import Slots

T = TypeVar("T")

CONFIG_ERROR = 2

app = typer.Typer(
    name="megatron-grpo",
    help="GRPO post-training across pipeline stages joined by slow links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer(help="Measurements without training.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as anchor.cadence=20.", show_default=False),
]


@app.callback()
def _root(
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """GRPO post-training across pipeline stages joined by slow links."""
    # The deepspeed launcher appends --local_rank; LOCAL_RANK in the environment says the same.


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; runs/NAME-TIME by default.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|PATH", help="Go on from a checkpoint.")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Start on these hosts: NAME slots=N lines.")] = None,
    include: Annotated[str, typer.Option(metavar="NAME[:SLOT,...][@...]", help="Only these hosts and slots.")] = "",
    exclude: Annotated[str, typer.Option(metavar="NAME[:SLOT,...][@...]", help="All but these.")] = "",
    no_ssh: Annotated[bool, typer.Option("--no-ssh", "--no_ssh", help="Start the ranks of this host only.")] = False,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", "--node_rank", help="This host's number among them, with --no-ssh.")
    ] = None,
    launcher: Annotated[str, typer.Option(help="pdsh, openmpi, mpich, impi, mvapich or slurm.")] = "pdsh",
    launcher_args: Annotated[
        str, typer.Option("--launcher-args", "--launcher_args", help="Further options of that launcher.")
    ] = "",
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", "--master_addr", help="Address of the first host.")
    ] = None,
    master_port: Annotated[
        int, typer.Option("--master-port", "--master_port", help="A free port of the first host.")
    ] = 29500,
) -> None:
    """Train a policy. Starts the ranks itself, here or on the hosts of a file, unless a launcher has done so."""
    with _config_errors():
        cfg = _checked(config, overrides)
        target = run_dir or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        arguments = ["train", str(config), *(overrides or []), "--run-dir", str(target)]
        arguments += ["--resume", resume] if resume is not None else []
        from megatron_grpo.launch.cluster import Cluster, adopt_rank, node_of, start_on_hosts

        if hostfile is None:
            adopt_rank(os.environ)
        node = node_of(hostfile, no_ssh=no_ssh, node_rank=node_rank)
        if _is_first_rank() and not node:
            _check_run_dir(target, run_dir is not None, resume)
            _check_resume(cfg, target, resume)
        if hostfile is None and "RANK" in os.environ:
            _check_world(cfg, os.environ.get("WORLD_SIZE"))
            _quiet_engines()
            from megatron_grpo.launch import cpu_threads, rank_environment

            os.environ.update(rank_environment({}, threads=cpu_threads(cfg.parallel)))
            from megatron_grpo.training.loop import train as train_on_this_rank

            code = train_on_this_rank(cfg, target, resume)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # all is written; on the usual way out the engines' threads may still abort the process
        _check_problems(cfg)
        if hostfile is None:
            from megatron_grpo.launch import start_local

            code = start_local(arguments, cfg.world_size, cfg.parallel)
        else:
            places = Cluster(hostfile, include, exclude, node, launcher, launcher_args, master_addr, master_port)
            code = start_on_hosts(arguments, places, cfg)
    raise typer.Exit(code)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Hosts as DeepSpeed reads them; without, every stage is on its own.")
    ] = None,
    include: Annotated[str, typer.Option(metavar="NAME[:SLOT,...][@...]", help="Only these hosts and slots.")] = "",
    exclude: Annotated[str, typer.Option(metavar="NAME[:SLOT,...][@...]", help="All but these.")] = "",
    link_rate: Annotated[str, typer.Option(metavar="RATE", help="Of a link between hosts.")] = "100mbit",
    latency: Annotated[float, typer.Option(min=0, metavar="MS", help="Of such a link, milliseconds one way.")] = 1.0,
    local_rate: Annotated[str, typer.Option(metavar="RATE", help="Of a link inside a host.")] = "400gbit",
    device_speed: Annotated[
        float, typer.Option(min=1e-6, metavar="TFLOP/S", help="That a rank's products reach.")
    ] = 200.0,
    memory_rate: Annotated[float, typer.Option(min=1e-3, metavar="GB/S", help="Of a rank's memory.")] = 2000.0,
    host_memory_rate: Annotated[
        float, typer.Option(min=1e-3, metavar="GB/S", help="A rank's share of its host's memory.")
    ] = 25.0,
    overhead: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Of a layer and micro-batch of a training forward.")
    ] = 0.0,
    decode_overhead: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Of a layer and micro-batch of a sampled column.")
    ] = 0.0,
    pass_overhead: Annotated[float, typer.Option(min=0, metavar="MS", help="Of a training pass.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a run would be: ranks, links, bytes, memory, time, and every config error. Starts nothing."""
    with _config_errors():
        from megatron_grpo.launch.hosts import Host
        from megatron_grpo.plan import Device, Rates, build_plan, outline_tables, parse_rate, plan_tables

        errors: list[str] = []
        cfg = _noting(errors, lambda: load_config(config, overrides))
        if cfg is not None:
            errors += check_config(cfg, sizes_alone=holds_sizes_alone(Path(cfg.model.path)))
            _noting(errors, lambda: _check_problems(cfg))
        slots = _noting(errors, lambda: _plan_slots(cfg, hostfile, include, exclude))
        between = _noting(errors, lambda: parse_rate(link_rate, "--link-rate"))
        local = _noting(errors, lambda: parse_rate(local_rate, "--local-rate"))
        overheads = (overhead / 1e3, decode_overhead / 1e3, pass_overhead / 1e3)
        device = Device(device_speed * 1e12, memory_rate * 1e9, host_memory_rate * 1e9, *overheads)
        whole = None
        if cfg is not None and slots is not None and between is not None and local is not None and not errors:
            hosts = [Host(name, len(numbers)) for name, numbers in slots.items()]
            rates = Rates(between, latency / 1e3, local, 2e-5)
            whole = _noting(errors, lambda: build_plan(cfg, hosts, rates, device))
        if as_json:
            print(json.dumps({**(whole.as_json() if whole else {}), "errors": errors}))
        elif cfg is not None:
            console = Console()
            for table in [*outline_tables(cfg), *(plan_tables(whole) if whole else [])]:
                console.print(table)
        if errors:
            raise ConfigError("\n".join(errors))


def _noting(errors: list[str], make: Callable[[], T]) -> T | None:
    """What ``make`` makes; of a ConfigError the lines go to ``errors``, so that others are found, too."""
    try:
        return make()
    except ConfigError as error:
        errors += str(error).splitlines()
        return None


def _plan_slots(cfg: Config | None, hostfile: Path | None, include: str, exclude: str) -> "Slots":
    """The slots of the hosts, checked as far as there is a config."""
    from megatron_grpo.launch.cluster import Cluster, choose
    from megatron_grpo.launch.hosts import read_hostfile, select

    if hostfile is None:
        return {}
    if cfg is None:
        return select(read_hostfile(hostfile), include, exclude)
    return choose(Cluster(hostfile, include, exclude), cfg)


ALONE = (
    *("parallel.tensor=1", "parallel.pipeline=1", "parallel.data=1", "parallel.reward_stage=false"),
    *("boundary.links=[pipeline]", "boundary.tensor_rank=null", "boundary.data_rank=null", "boundary.data_warmup=null"),
)
"""One process, which has no links."""


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="MODEL_DIR|RUN", help="Model directory, or a finished run.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; the run's own by default.")] = None,
) -> None:
    """Score a policy on the validation problems and print the scores as JSON."""
    with _config_errors():
        model, file = _eval_target(target, config)
        chosen = [f"model.path={json.dumps(str(model.absolute()))}"]
        if any((model / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            chosen.append(f"tokenizer.path={json.dumps(str(model.absolute()))}")
        cfg = _checked(file, [*(overrides or []), *chosen, *ALONE])
        from megatron_grpo.launch import require_engines

        require_engines()
        _quiet_engines()
        from megatron_grpo.training.evaluate import evaluate as score

        scores: dict[str, Any] = score(cfg)
    print(json.dumps(scores))


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="YAML file of arms and seeds.")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; as many as the cores or GPUs hold by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the runs are kept; runs/NAME by default.")] = None,
    only: Annotated[str, typer.Option(metavar="ARM,...", help="Run these arms only.", show_default=False)] = "",
    fresh: Annotated[
        str, typer.Option(metavar="ARM,...", help="Delete the runs of these arms, start anew.", show_default=False)
    ] = "",
) -> None:
    """Run arms x seeds, a few at a time; goes on where it was interrupted. results.json has means and errors."""
    with _config_errors():
        from megatron_grpo.sweep.runner import run_sweep

        code = run_sweep(file, out=out, jobs=jobs, only=_names(only), fresh=_names(fresh))
    raise typer.Exit(code)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run or sweep directories.")],
    out: Annotated[Path, typer.Option(help="The page; PNGs go beside it.")] = Path("report.html"),
) -> None:
    """Write an HTML page and PNGs of one or several runs."""
    with _config_errors():
        from megatron_grpo.report import write_report

        for path in write_report(runs, out):
            print(path)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint; its format is recognised.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="To write; an older one of the same kind is replaced.")],
    to: Annotated[
        Literal["hf", "megatron", "deepspeed-universal"],
        typer.Option(help="Hugging Face safetensors, Megatron's torch_dist, or a run's state for any topology."),
    ],
    tensor: Annotated[
        int | None, typer.Option(min=1, help="Tensor ranks, not for hf; 1 by default.", show_default=False)
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages, not for hf; 1 by default.", show_default=False)
    ] = None,
    data: Annotated[
        int | None,
        typer.Option(min=1, help="Data ranks of the run to come, for deepspeed-universal.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of all weights; kept by default.")
    ] = None,
    config_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Hugging Face directory with config and tokenizer, where SRC has none."),
    ] = None,
) -> None:
    """Convert a checkpoint between Hugging Face, Megatron and DeepSpeed, bit by bit the same weights."""
    with _config_errors():
        from megatron_grpo.launch import require_engines

        require_engines()
        _quiet_engines()
        from megatron_grpo.conversion.convert import Wish, convert_on_screen

        wish = Wish(to=to, tensor=tensor, pipeline=pipeline, data=data, dtype=dtype, config_dir=config_from)
        convert_on_screen(source, target, wish)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="Checkpoint; its format is recognised.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another of the same model, in any format.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Round both to it first; compared as they are by default."),
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Compare what both compute, too, in transformers and in Megatron.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="For --logits: JSON lines with prompts; 8 built-in ones by default.")
    ] = None,
    config_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Hugging Face directory of the model, for a checkpoint without config."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE|-", help="Where the result goes; - is the screen.")
    ] = None,
) -> None:
    """Compare two checkpoints tensor by tensor. Ends with 0 where all bits are equal, with 1 where not."""
    with _config_errors():
        from megatron_grpo.launch import require_engines

        require_engines()
        _quiet_engines()
        from megatron_grpo.bench.compare import compare_on_screen

        equal = compare_on_screen(
            one, other, dtype=dtype, config_from=config_from, logits=logits, prompts=prompts, json_file=json_file
        )
    raise typer.Exit(0 if equal else 1)


@bench_app.callback()
def _bench() -> None:
    """Measurements without training."""


@bench_app.command()
def gap(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face directory of the model.")],
    boundaries: Annotated[int, typer.Option(help="Cuts between even stages.")] = 3,
    shares: Annotated[
        str, typer.Option("--bytes", metavar="SHARE,...", help="Shares of a bfloat16 crossing.")
    ] = "0.03,0.05,0.10",
    after: Annotated[
        str | None, typer.Option(metavar="LAYER,...", help="Cut after these layers instead.", show_default=False)
    ] = None,
    texts: Annotated[int, typer.Option(help="Sampled answers that are measured on.")] = 16,
    fit_texts: Annotated[int, typer.Option(help="Sampled answers, to other prompts, that codecs are fitted on.")] = 128,
    max_response: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompts; built-in ones by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the answers.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE|-", help="Where the result goes; - is the screen.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG of the result.")] = None,
) -> None:
    """What each codec and payload would cost a real model: bytes, errors, log-prob gaps, gradient directions."""
    with _config_errors():
        from megatron_grpo.launch import require_engines

        require_engines()
        _quiet_engines()
        from megatron_grpo.bench.gap import GapSettings
        from megatron_grpo.bench.report import bench_gap

        settings = GapSettings(
            (), texts=texts, fit_texts=fit_texts, max_response=max_response, seed=seed, prompts=prompts
        )
        bench_gap(
            model_dir,
            boundaries,
            shares,
            after=after,
            settings=settings,
            device=device,
            json_file=json_file,
            figure=figure,
        )


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _checked(config: Path, overrides: list[str] | None) -> Config:
    cfg = load_config(config, overrides)
    errors = check_config(cfg)
    if errors:
        raise ConfigError("\n".join(errors))
    return cfg


def _check_problems(cfg: Config) -> None:
    """Every row of the data and every gold answer, and functions and models that score: before any rank starts."""
    from megatron_grpo.data import Reading, build_task
    from megatron_grpo.rollout.rewards import build_rewards, gold_check

    build_rewards(cfg.reward)
    if cfg.reward.models:
        from megatron_grpo.backends.reward_models import check_reward_models

        check_reward_models(cfg)
    build_task(cfg.data, cfg.train.seed, Reading(gold_check(cfg.reward)))


def _check_run_dir(run_dir: Path, given: bool, resume: str | None) -> None:
    if resume == "auto" and not given:
        raise ConfigError("--resume=auto: needs to know the run; add --run-dir")
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir={run_dir}: is a file; give a directory")
    if resume is None and run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"--run-dir={run_dir}: is not empty; give another, or --resume auto to go on with it")


def _check_resume(cfg: Config, run_dir: Path, resume: str | None) -> None:
    """A checkpoint that is not there, though named, or that was written under other settings, ends it before any rank
    starts; ``auto`` may find none."""
    if resume is not None:
        from megatron_grpo.training.files import CheckpointFolder
        from megatron_grpo.training.resume import read_progress, refuse_code

        checkpoint = CheckpointFolder(run_dir / "checkpoints", cfg.train.keep).resolve(resume, note=lambda text: None)
        if checkpoint is not None:
            read_progress(checkpoint, cfg)
            refuse_code(checkpoint)


def _check_world(cfg: Config, world: str | None) -> None:
    if world != str(cfg.world_size):
        parallel = cfg.parallel
        raise ConfigError(
            f"WORLD_SIZE={world}: the config needs {cfg.world_size} ranks (parallel.tensor={parallel.tensor}"
            f" x pipeline={parallel.pipeline}{' + reward_stage' * parallel.reward_stage} x data={parallel.data}); "
            "start as many, or change parallel"
        )


def _eval_target(target: Path, config: Path | None) -> tuple[Path, Path]:
    """The model directory and the config file that ``eval`` was given."""
    if (target / "config.json").is_file():
        if config is None:
            raise ConfigError(f"{target}: is a model directory, which does not say how to score; add --config")
        return target, config
    if (target / "policy" / "config.json").is_file():
        return target / "policy", config or target / "config.yaml"
    raise ConfigError(f"{target}: is neither a model directory nor a finished run; give one that holds config.json")


def _quiet_engines() -> None:
    """Megatron warns at import, on every rank, of each optional package that it does without; nobody can act on it."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _config_errors() -> Iterator[None]:
    """A ConfigError ends the command with exit code 2; the first rank alone prints it."""
    try:
        yield
    except ConfigError as error:
        if _is_first_rank():
            for line in str(error).splitlines():
                print(f"config error: {line}", file=sys.stderr)
        raise typer.Exit(CONFIG_ERROR) from None


def main() -> None:
    """Entry point of ``megatron-grpo`` and ``python -m megatron_grpo``."""
    app(prog_name="megatron-grpo")

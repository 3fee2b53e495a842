"""Host files, the choice of slots, placement, and the command lines that DeepSpeed's launchers make of ours."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher import multinode_runner, runner
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import ConfigError, ParallelConfig, load_config
from megatron_grpo.launch import cluster, local
from megatron_grpo.launch.cluster import Cluster, adopt_rank, choose, runner_command, shell_word
from megatron_grpo.launch.hosts import Host, rank_hosts, read_hostfile, select
from megatron_grpo.parallel.placement import check_tensor_hosts, use_interface
from tests.unit.test_config import home

__all__ = ["home"]

NODES = [Host("work1", 2), Host("work2", 4)]

AWKWARD = [
    "data.prompt_template={question} $HOME\n",
    'data.options={"a": [1, 2]}',
    "two words",
    "it's",
    r"back\slash and \"quoted\" `date`",
    "50%h",
    "100 %n $PATH",
    "a;b&c|d>e*f?(g)#h",
    "plain=1",
    "",
]


def test_a_host_file_is_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# site A\nwork2 slots=4\n\n  work1\tslots=2  # two GPUs\nfd00::7 slots=1\n")
    assert read_hostfile(file) == [Host("work2", 4), Host("work1", 2), Host("fd00::7", 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb slot=2\n", "line 2: 'b slot=2' is not a host"),
        ("a slots=x\n", "line 1: 'a slots=x' is not a host"),
        ("\na slots=-1\n", "line 2"),
        ("a slots=0\n", "line 1: 'a slots=0' is not a host"),
        ("a\n", "line 1: 'a' is not a host"),
        ("a slots=2\n#\na slots=2\n", "line 3: a is there twice"),
        ("# nobody\n\n", "names no host"),
    ],
)
def test_mistakes_in_a_host_file_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(file)
    assert str(caught.value).startswith(str(file)) and said in str(caught.value)


def test_a_host_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Case G9: never a silent local run."""
    with pytest.raises(ConfigError, match=r"--hostfile=.*nowhere: cannot be read"):
        read_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ("", "", {"work1": [0, 1], "work2": [0, 1, 2, 3]}),
        ("work2", "", {"work2": [0, 1, 2, 3]}),  # case G9: a name alone means all of its slots
        ("work2:2,0", "", {"work2": [0, 2]}),
        ("work2:3@work1", "", {"work1": [0, 1], "work2": [3]}),
        ("work2:1@work2:3", "", {"work2": [1, 3]}),
        ("", "work1", {"work2": [0, 1, 2, 3]}),
        ("", "work1:0@work2:1,2", {"work1": [1], "work2": [0, 3]}),
    ],
)
def test_slots_are_chosen_as_deepspeed_chooses_them(include: str, exclude: str, chosen: dict[str, list[int]]) -> None:
    slots = select(NODES, include, exclude)
    assert slots == chosen
    pool = {host.name: host.slots for host in NODES}
    theirs = runner.parse_inclusion_exclusion(pool, include, exclude)
    assert list(slots.items()) == list(theirs.items())
    world = runner.encode_world_info(theirs)
    assert f"--world_info={world}" in local.node_command([], slots, node=0, address="a", port=1)


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("work1:2,3", "", "--include=work1:2,3: work1 has 2 slots, numbered from 0, and no slot 2"),  # case G9
        ("work3", "", "--include=work3: 'work3' is not in the host file; use work1, work2"),
        ("work3:0", "", "'work3' is not in the host file"),
        ("work1:", "", "write work1:0,1"),
        ("work1:a", "", "'a' are not slots of work1"),
        ("work1", "work2", "give one of them"),
        ("", "work1@work2", "--exclude=work1@work2: leaves no slot"),
    ],
)
def test_wrong_choices_are_one_sentence(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(NODES, include, exclude)
    assert said in str(caught.value)


def test_hosts_with_ipv6_addresses_have_slots(tmp_path: Path) -> None:
    assert select([Host("fd00::1", 2), Host("fd00::2", 1)], include="fd00::1:1@fd00::2") == {
        "fd00::1": [1],
        "fd00::2": [0],
    }


def test_tensor_groups_stay_inside_a_host() -> None:
    hosts = rank_hosts({"a": [0, 1, 2], "b": [0, 3, 5]})
    assert hosts == ["a", "a", "a", "b", "b", "b"]
    check_tensor_hosts(hosts, 3)
    check_tensor_hosts(hosts, 1)
    with pytest.raises(
        ConfigError, match=r"parallel.tensor=2: ranks 2 to 3 share a stage and would be on hosts a and b"
    ):
        check_tensor_hosts(hosts, 2)


@pytest.mark.parametrize(
    ("text", "options", "overrides", "said"),
    [
        ("a slots=1\nb slots=2", {}, [], "has 3 slots (a 1, b 2) and the config needs 2 ranks"),
        ("a slots=1\nb slots=3", {}, ["parallel.tensor=2"], "ranks 0 to 1 share a stage"),
        ("a slots=1\nb slots=1", {"node": 2}, [], "--node-rank=2: there are 2 hosts (a, b); use 0 to 1"),
        ("a slots=1\nb slots=1", {"launcher": "ssh"}, [], "--launcher=ssh: is not known; use one of pdsh, openmpi"),
        ("a slots=2\nb slots=1", {"launcher": "openmpi", "include": "a"}, [], "knows neither --include nor --exclude"),
        ("fd00::1 slots=2\nb slots=1", {"include": "fd00::1"}, [], "takes the colon of fd00::1 in --include"),
    ],
)
def test_what_cannot_start_is_refused(
    home: Path, text: str, options: dict[str, object], overrides: list[str], said: str
) -> None:
    (home / "hosts").write_text(text)
    where = Cluster(home / "hosts", **options)  # type: ignore[arg-type]  # a table of several types
    with pytest.raises(ConfigError) as caught:
        choose(where, load_config(home / "run.yaml", overrides))
    assert said in str(caught.value)


def parsed(home: Path, options: dict[str, object], overrides: list[str]) -> argparse.Namespace:
    """What DeepSpeed's runner understands of our command."""
    (home / "hosts").write_text("a slots=1\nb slots=1\n")
    where = Cluster(home / "hosts", **options)  # type: ignore[arg-type]  # a table of several types
    config = load_config(home / "run.yaml", overrides)
    command = runner_command(AWKWARD, where, choose(where, config), config)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    args: argparse.Namespace = runner.parse_args(command[3:])
    return args


def test_arguments_survive_pdsh_and_the_remote_shell(home: Path) -> None:
    """DeepSpeed's own pdsh command, expanded as pdsh does and run by a real shell, gives every argument back."""
    args = parsed(home, {"address": "[fd00::1]", "port": 5001}, [])
    assert (args.master_addr, args.master_port, args.module, args.force_multi) == ("fd00::1", 5001, True, True)
    command = multinode_runner.PDSHRunner(args, "WORLD").get_cmd({}, {"a": [0], "b": [0]})[0]
    sent = " ".join(command[command.index("-w") + 2 :])
    remote = sent.replace("%%", "\0").replace("%n", "1").replace("%h", "HOST").replace("\0", "%")
    show = f"{sys.executable} -c 'import json,sys; print(json.dumps(sys.argv[1:]))'"
    remote = remote.replace(f"{sys.executable} -u -m deepspeed.launcher.launch", show)
    printed = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True).stdout
    seen = json.loads(printed)
    assert "--node_rank=1" in seen and "--master_addr=fd00::1" in seen
    assert seen[seen.index("megatron_grpo") + 1 :] == AWKWARD


def test_slurm_starts_the_module(home: Path) -> None:
    """Tasks are started by srun without a shell, so that arguments go as they are."""
    args = parsed(home, {"launcher": "slurm", "launcher_args": "--partition p"}, [])
    command = multinode_runner.SlurmRunner(args, "WORLD", {"a": 1, "b": 1}).get_cmd({}, {"a": [0], "b": [0]})
    assert command[:5] == ["srun", "-n", "2", "--partition", "p"]
    assert command[-len(AWKWARD) - 4 :] == [sys.executable, "-u", "-m", "megatron_grpo", *AWKWARD]
    assert args.no_ssh_check


def test_open_mpi_gets_the_meeting_point_and_the_interface(home: Path) -> None:
    args = parsed(home, {"launcher": "openmpi"}, ["parallel.interface=ib0"])
    command = multinode_runner.OpenMPIRunner(args, "WORLD", {"a": 1, "b": 1}).get_cmd({}, {"a": [0], "b": [0]})
    text = " ".join(command)
    assert "-x MASTER_ADDR -x MASTER_PORT --mca btl_tcp_if_include ib0" in text and "eth0" not in text
    assert command[-len(AWKWARD) - 4 :] == [sys.executable, "-u", "-m", "megatron_grpo", *AWKWARD]


def test_plain_words_are_not_quoted() -> None:
    assert shell_word("grpo.group_size=8") == "grpo.group_size=8"


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ],
)
def test_a_task_of_mpi_or_slurm_is_a_rank_where_a_meeting_point_is_named(names: tuple[str, str, str]) -> None:
    task = dict(zip(names, ("3", "8", "1"), strict=True))
    alone = dict(task)
    adopt_rank(alone)
    assert alone == task, "a batch script is no rank"
    met = task | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    adopt_rank(met)
    assert (met["RANK"], met["WORLD_SIZE"], met["LOCAL_RANK"]) == ("3", "8", "1")


def test_this_host_alone_is_started_directly(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host file with one host that is this one needs no ssh; one with a host elsewhere never runs here."""
    started: list[list[str]] = []
    monkeypatch.setattr(cluster, "supervise", lambda command, environment, **how: started.append(command) or 0)
    config = load_config(home / "run.yaml")
    for name in (socket.gethostname(), "elsewhere"):
        (home / "hosts").write_text(f"{name} slots=2\n")
        cluster.start_on_hosts(["train"], Cluster(home / "hosts"), config)
    assert [command[command.index("-m") + 1] for command in started] == [
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
    ]


def test_one_visible_gpu_is_used_on_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case G9: CUDA_VISIBLE_DEVICES=1 is GPU 1 of this machine, not a slot that does not exist."""
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    found = local.visible_gpus
    monkeypatch.setattr(local, "visible_gpus", lambda: found(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert local.device_ids(1, ParallelConfig(pipeline=1)) == [1]


def test_an_interface_is_checked_and_told_to_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    use_interface(None)
    assert os.environ == {}
    with pytest.raises(ConfigError, match=r"parallel.interface=eth77: .* has no such interface; use one of .*lo"):
        use_interface("eth77")
    use_interface("lo")
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-ssh", "--node-rank", "0"], "add --hostfile"),
        (["--hostfile", "hosts", "--no-ssh"], "--node-rank=N belong together"),
        (["--hostfile", "hosts", "--node-rank", "1"], "--node-rank=N belong together"),
        (["--hostfile", "nowhere"], "--hostfile=nowhere: cannot be read"),
        (["--hostfile", "hosts", "parallel.data=2"], "has 2 slots (a 1, b 1) and the config needs 4 ranks"),
    ],
)
def test_the_command_refuses_what_cannot_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(cluster, "supervise", lambda command, environment, **how: pytest.fail("a rank was started"))
    (home / "hosts").write_text("a slots=1\nb slots=1\n")
    result = CliRunner().invoke(app, ["train", "run.yaml", "grpo.prompts_per_step=32", *options])
    assert result.exit_code == 2
    assert "config error: " in result.output and said in result.output
    assert not (home / "runs").exists()


RANK = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("up", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
sys.exit(subprocess.run([sys.executable, "-c", {RANK!r}]).returncode)
"""


def test_a_signal_reaches_the_ranks_and_not_their_launcher(tmp_path: Path) -> None:
    """Which would kill them after 30 s: this one ends with 1 when it is told, and its rank with 143."""
    code = (
        "import os, sys\nfrom megatron_grpo.launch.local import supervise\n"
        "code = supervise([sys.executable, '-c', sys.argv[1]], dict(os.environ))\nprint(code)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "143\n"

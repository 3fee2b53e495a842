"""Started on two hosts from one command, through DeepSpeed's runner: pdsh and ssh are scripts that stay here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.config import load_config
from tests.e2e.test_run import ROOT, SMOKE, rows_of

PDSH = """#!/bin/sh
# pdsh -S -f FANOUT -w HOST,HOST WORD...: each host's shell gets the words joined, with %n its number and %% a percent
shift 3; hosts=$(echo "$2" | tr , ' '); shift 2
number=0
for host in $hosts; do
    sh -c "$(printf '%s' "$*" | sed "s/%%/\\x01/g; s/%n/$number/g; s/%h/$host/g; s/\\x01/%/g")" &
    number=$((number + 1)) last=$!
done
wait $last
"""
SSH = "#!/bin/sh\nexit 0\n"


@pytest.mark.slow
def test_a_run_on_two_hosts_by_pdsh(tmp_path: Path) -> None:
    """Arguments with spaces, quotes, braces, dollars and percents reach the ranks as they are."""
    for name, text in (("pdsh", PDSH), ("ssh", SSH)):
        script = tmp_path / name
        script.write_text(text)
        script.chmod(0o755)
    (tmp_path / "hosts").write_text("left slots=1\nright slots=1\n")
    run = tmp_path / "a run of 100 %n $HOME"
    command = [
        *(
            sys.executable,
            "-m",
            "megatron_grpo",
            "train",
            SMOKE,
            "train.eval_every=100",
            'data.prompt_template="{question}\\n"',
        ),
        *("--run-dir", str(run)),
        *("--hostfile", str(tmp_path / "hosts"), "--master-addr", "127.0.0.1", "--master-port", "29631"),
    ]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=os.environ | path, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(rows_of(run)) == 4
    assert load_config(run / "config.yaml").data.prompt_template == "{question}\n"

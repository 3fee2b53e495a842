"""Private names of the engines that this package enters by; an upgrade that moves one must fail here."""

import inspect

import deepspeed.launcher.launch as deepspeed_launch
import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


def test_p2p_communicator_funnels_everything_through_communicate() -> None:
    assert list(inspect.signature(P2PCommunicator._communicate).parameters) == [
        "self",
        "tensor_send_next",
        "tensor_send_prev",
        "recv_prev",
        "recv_next",
        "tensor_shape",
        "wait_on_reqs",
    ]


def test_zero3_compares_fetches_through_one_patchable_name() -> None:
    assert callable(coordinator.assert_ints_same_as_other_ranks)
    assert "assert_ints_same_as_other_ranks(" in inspect.getsource(coordinator.PartitionedParameterCoordinator)


def test_the_node_launcher_takes_the_options_it_is_started_with() -> None:
    source = inspect.getsource(deepspeed_launch.parse_args)
    options = ("--world_info", "--master_addr", "--master_port", "--module", "--no_local_rank", "--quiet")
    assert [option for option in options if f'"{option}"' not in source] == []


def test_the_node_launcher_ends_the_other_ranks_when_one_fails() -> None:
    source = inspect.getsource(deepspeed_launch.main)
    assert "process.returncode != 0" in source
    assert "terminate_process_tree(process.pid)" in source

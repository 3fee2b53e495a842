"""Private names of the engines that this package enters by; an upgrade that moves one must fail here."""

import inspect

import deepspeed.launcher.launch as deepspeed_launch
import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


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


def test_zero1_averages_through_one_patchable_name() -> None:
    """Gradients that are averaged already are cut up by the rest of the reduction."""
    assert list(inspect.signature(DeepSpeedZeroOptimizer.average_tensor).parameters)[1:] == [
        "tensor",
        "communication_data_type",
    ]
    reduction = inspect.getsource(DeepSpeedZeroOptimizer.reduce_ipg_grads)
    assert "all_reduce" not in reduction and reduction.count("self.average_tensor(") == 2


def test_a_column_parallel_weight_can_leave_its_inputs_gradient_to_us() -> None:
    assert "disable_grad_reduce" in inspect.signature(ColumnParallelLinear).parameters
    forward = inspect.getsource(ColumnParallelLinear.forward)
    assert "or self.disable_grad_reduce" in forward


def test_the_node_launcher_takes_the_options_it_is_started_with() -> None:
    source = inspect.getsource(deepspeed_launch.parse_args)
    options = ("--world_info", "--master_addr", "--master_port", "--module", "--no_local_rank", "--quiet")
    assert [option for option in options if f'"{option}"' not in source] == []


def test_the_node_launcher_ends_the_other_ranks_when_one_fails() -> None:
    source = inspect.getsource(deepspeed_launch.main)
    assert "process.returncode != 0" in source
    assert "terminate_process_tree(process.pid)" in source

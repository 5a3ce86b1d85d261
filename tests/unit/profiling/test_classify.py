# ruff: noqa: E501 - stacks as they were recorded
"""Stacks are sorted by rules: recorded ones each into the category that their thread was in."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling.classify import by_thread, classify, default_rules, load_rules, sort
from paceline.profiling.evidence import CATEGORIES, AttachError, Frame, LevelId, Stack

THREAD = "thread_run (libpython3.11.so.1.0);Thread._bootstrap (threading.py:1002);Thread.run (threading.py:982);"
"""How stacks of a Python thread begin."""
LOCKED = (
    "lock_PyThread_acquire_lock (libpython3.11.so.1.0);PyThread_acquire_lock_timed (libpython3.11.so.1.0);"
    "0x7fce994aed90 (libc.so.6);0x7fce994a3f16 (libc.so.6)"
)
"""Recorded: a thread asleep in a lock of Python's, whose libc has no symbols for it."""
ITEM = "train (train.py:9);THPVariable_item (libtorch_python.so);at::native::item (libtorch_cpu.so);"
ENGINE = "torch::autograd::Engine::evaluate_function (libtorch_cpu.so);"
ASLEEP = {"level": "3", "state": "S", "syscall": "futex", "has_gil": False}
RUNNING = {"level": "3", "state": "R", "syscall": "running", "has_gil": False}

Case = tuple[str, str, str, dict[str, Any]]


def case(rule: str, category: str, folded: str, **facts: Any) -> Case:
    return rule, category, folded, facts


# Stacks of this repository's test programs and of torch on the CPU are as py-spy and pystack gave them, shortened in the
# middle. Those of "H200" are put together from the frames that were noted there (libcuda's own are bare addresses).
# "Made" ones follow the libraries' sources.
CASES: list[Case] = [
    # the tool's word counts before everything
    case("gil.said", "gil_wait", "f (a.py:1);THPVariable_add (libtorch_python.so)", level="4b", waits_for_gil=True),
    # compiling (the graph on the CPU; the rest made)
    case("compile.graph", "compile", "f (a.py:1);_compile (torch/_dynamo/convert_frame.py:1);trace (b.py:3)"),
    case(
        "compile.graph",
        "compile",
        "f (a.py:1);_compile (torch/_dynamo/convert_frame.py:1);cudaLaunchKernel (libcudart.so.12);cuLaunchKernel (libcuda.so.1)",
    ),
    case("compile.graph", "compile", "compile_fx_inner (compile_fx.py:700);run (graph.py:1)", **RUNNING),
    case("compile.kernel", "compile", "run (triton/runtime/jit.py:1);compile (triton/compiler/compiler.py:9)"),
    case("compile.kernel", "compile", "_bench (triton/runtime/autotuner.py:1);cuCtxSynchronize_v2 (libcuda.so.1)"),
    case("compile.load", "compile", "cudaLaunchKernel (libcudart.so.12);cuModuleLoadData (libcuda.so.1);0x7f0 (libcuda.so.1)"),
    # the device's memory (H200)
    case(
        "churn.expandable",
        "allocator_churn",
        "c10::cuda::CUDACachingAllocator::Native::ExpandableSegment::mapAndSetAccess (libc10_cuda.so);"
        "cuMemSetAccess (libcuda.so.1);0x7f11 (libcuda.so.1);ioctl (libc.so.6)",
    ),
    case("churn.expandable", "allocator_churn", "unmap_block (libc10_cuda.so);cuMemUnmap (libcuda.so.1);ioctl (libc.so.6)"),
    case(
        "churn.release",
        "allocator_churn",
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::release_block (libc10_cuda.so);"
        "cudaFree (libcudart.so.12);cuMemFree_v2 (libcuda.so.1);cuCtxSynchronize_v2 (libcuda.so.1);ioctl (libc.so.6)",
    ),
    case(
        "churn.release",
        "allocator_churn",
        f"{THREAD}repeat (fake_cuda.py:46);ffi_call (libffi.so.8.1.2);cuMemFree_v2 (libcuda.so.1);"
        "cuCtxSynchronize (libcuda.so.1);0x7fe7298ab1b0 (libcuda.so.1);nanosleep (libc.so.6);clock_nanosleep (libc.so.6)",
    ),
    case("churn.release", "allocator_churn", "f (a.py:1);empty_cache (torch/cuda/memory.py:224)", **RUNNING),
    case(
        "churn.alloc",
        "allocator_churn",
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::alloc_block (libc10_cuda.so);"
        "cudaMalloc (libcudart.so.12);cuMemAlloc_v2 (libcuda.so.1);ioctl (libc.so.6)",
    ),
    # launches (H200), and the order that matters: a full queue first
    case(
        "launch_queue.full",
        "launch_queue_full",
        "step (train.py:3);at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float> > (libtorch_cuda.so);"
        "cudaLaunchKernel (libcudart.so.12);cuLaunchKernel (libcuda.so.1);0x7f61 (libcuda.so.1);sched_yield (libc.so.6)",
    ),
    case(
        "launch_queue.full",
        "launch_queue_full",
        f"{THREAD}repeat (fake_cuda.py:46);cuLaunchKernelEx (libcuda.so.1);sched_yield (libc.so.6)",
    ),
    case(
        "launch.kernel",
        "launch",
        "step (train.py:3);at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float> > (libtorch_cuda.so);"
        "cudaLaunchKernel (libcudart.so.12);cuLaunchKernel (libcuda.so.1);0x7f61 (libcuda.so.1)",
    ),
    case(
        "launch.kernel",
        "launch",
        "at::cuda::blas::gemm_internal<float> (libtorch_cuda.so);cublasGemmEx (libcublas.so.12);"
        "cublasLtTSTMatmul (libcublasLt.so.12);cuLaunchKernelEx (libcuda.so.1);0x7f61 (libcuda.so.1);ioctl (libc.so.6)",
    ),
    case(
        "launch.kernel",
        "launch",
        f"{ENGINE}at::_ops::mm::call (libtorch_cpu.so);cudaLaunchKernelExC (libcudart.so.12);cuLaunchKernelEx (libcuda.so.1)",
    ),
    case("launch.graph", "launch", "replay (torch/cuda/graphs.py:80);cudaGraphLaunch (libcudart.so.12);cuGraphLaunch (libcuda.so.1)"),
    case("launch.triton", "launch", "call (/tmp/x/cabc.py:9);run (torch/_inductor/runtime/triton_heuristics.py:1200)"),
    # exchanges between ranks (made)
    case("idle.collective_watchdog", "sleep", "c10d::ProcessGroupNCCL::Watchdog::runLoop (libtorch_cuda.so);c10d::ProcessGroupNCCL::Watchdog::run (libtorch_cuda.so);pthread_cond_clockwait (libc.so.6)"),
    case("collective.nccl", "collective", "c10d::ProcessGroupNCCL::allreduce (libtorch_cuda.so);ncclAllReduce (libnccl.so.2);cuLaunchKernelEx (libcuda.so.1)"),
    case("collective.gloo", "collective", "c10d::ProcessGroupGloo::AsyncWork::execute (libtorch_cpu.so);gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)"),
    case("collective.python", "collective", "all_reduce (torch/distributed/distributed_c10d.py:2810)", **ASLEEP),
    # waits for the device (H200)
    case(
        "sync.device",
        "sync",
        "synchronize (torch/cuda/__init__.py:1083);c10::cuda::device_synchronize (libc10_cuda.so);"
        "cudaDeviceSynchronize (libcudart.so.12);0x7f6 (libcuda.so.1);cuCtxSynchronize_v2 (libcuda.so.1);0x7f7 (libcuda.so.1)",
    ),
    case("sync.device", "sync", "f (a.py:1);synchronize (torch/cuda/__init__.py:1083)", **RUNNING),
    case(
        "sync.item",
        "sync",
        f"{ITEM}at::native::_local_scalar_dense_cuda (libtorch_cuda.so);cudaStreamSynchronize (libcudart.so.12);"
        "cuStreamSynchronize (libcuda.so.1);0x7f61 (libcuda.so.1)",
    ),
    case("sync.nonzero", "sync", "at::native::nonzero_cuda_out_impl<bool> (libtorch_cuda.so);cudaStreamSynchronize (libcudart.so.12)"),
    case("sync.stream", "sync", f"{THREAD}wait (fake_cuda.py:30);ffi_call (libffi.so.8.1.2);cuStreamSynchronize (libcuda.so.1);clock_nanosleep (libc.so.6)"),
    case("sync.stream", "sync", "f (a.py:1);Stream.synchronize (torch/cuda/streams.py:110)", **RUNNING),
    case("sync.event", "sync", "Event.synchronize (torch/cuda/streams.py:240);cudaEventSynchronize (libcudart.so.12)"),
    case("sync.python", "sync", "f (a.py:1);synchronize (streams.py:240)", **ASLEEP),
    case("sync.copy", "sync", "f (a.py:1);cudaMemcpy (libcudart.so.12);0x7f61 (libcuda.so.1)"),
    case("sync.copy", "sync", f"{THREAD}repeat (fake_cuda.py:46);cuMemcpyDtoH_v2 (libcuda.so.1);clock_nanosleep (libc.so.6)"),
    case("copy.async", "async_copy", "at::native::copy_kernel_cuda (libtorch_cuda.so);cudaMemcpyAsync (libcudart.so.12);cuMemcpyHtoDAsync_v2 (libcuda.so.1)"),
    # the GIL
    case("gil.wait", "gil_wait", f"{THREAD}want (gil_hog.py:29);time_sleep (libpython3.11.so.1.0);pthread_cond_timedwait (libc.so.6);0x7fc94f0a3f16 (libc.so.6)"),
    case("gil.wait", "gil_wait", "f (a.py:1);THPVariable_add (libtorch_python.so);pybind11::gil_scoped_release::~gil_scoped_release (libtorch_python.so);pthread_cond_timedwait (libc.so.6)"),
    case("gil.wait", "gil_wait", "Condition.wait (threading.py:327);lock_PyThread_acquire_lock (libpython3.11.so.1.0);pthread_cond_timedwait (libc.so.6);0x7f59f52a3f16 (libc.so.6)"),
    case("gil.wait", "gil_wait", "f (a.py:1);take_gil (libpython3.11.so.1.0);pthread_cond_timedwait@@GLIBC_2.3.2 (libc.so.6);__pthread_cond_wait_common (libc.so.6);__futex_abstimed_wait_common (libc.so.6)", level="4b"),
    case("gil.handover", "gil_wait", f"{THREAD}work (starved.py:21);pthread_cond_wait (libc.so.6);0x7f68118a3f16 (libc.so.6)"),
    case("gil.torch", "gil_wait", "torch::autograd::PyNode::apply (libtorch_python.so);pybind11::gil_scoped_acquire::gil_scoped_acquire (libtorch_python.so);__futex_abstimed_wait_common (libc.so.6)"),
    case("gc.collect", "gc", "f (a.py:1);gc_collect_main (libpython3.11.so.1.0);subtract_refs (libpython3.11.so.1.0)"),
    # waits for other threads
    case("queue.channel", "queue_wait", "OrderedChannel.get (paceline/pipeline/channel.py:110);OrderedChannel._wait_to_get (paceline/pipeline/channel.py:170);Condition.wait (threading.py:331)", **ASLEEP),
    case("queue.channel", "queue_wait", "_wait_to_put (channel.py:151);wait (threading.py:327)", **ASLEEP),
    case(
        "queue.data_loader",
        "queue_wait",
        "_MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291);Queue.get (multiprocessing/queues.py:113);"
        "_ConnectionBase.poll (multiprocessing/connection.py:257);Connection._poll (multiprocessing/connection.py:440);wait (multiprocessing/connection.py:947);"
        "_PollLikeSelector.select (selectors.py:415);select_poll_poll (selectmodule.c.h:223);poll (libc.so.6)",
    ),
    case("queue.thread", "queue_wait", f"{THREAD}Queue.get (queue.py:171);Condition.wait (threading.py:327);{LOCKED}"),
    case("queue.thread", "queue_wait", f"{THREAD}Queue.put (queue.py:140);Condition.wait (threading.py:327)", **ASLEEP),
    case("queue.thread", "queue_wait", "get (queue.py:171);wait (threading.py:327)", **ASLEEP),
    case("queue.simple", "queue_wait", f"{THREAD}_queue_SimpleQueue_get (_queuemodule.c.h:177);PyThread_acquire_lock_timed (libpython3.11.so.1.0);0x7fc (libc.so.6)"),
    case("queue.process", "queue_wait", f"{THREAD}Queue._feed (multiprocessing/queues.py:231);Condition.wait (threading.py:327);{LOCKED}"),
    case("queue.pool", "queue_wait", "Thread.run (threading.py:982);_worker (concurrent/futures/thread.py:81)", **ASLEEP),
    case("lock.python", "lock", "Event.wait (threading.py:629);Condition.wait (threading.py:327)", **ASLEEP),
    case("lock.python", "lock", "Thread.join (threading.py:1119);Thread._wait_for_tstate_lock (threading.py:1139)", **ASLEEP),
    case("lock.native", "lock", f"{THREAD}convoy (lock_convoy.py:29);{LOCKED}"),
    # nothing to do
    case("idle.openmp", "sleep", "clone3 (libc.so.6);start_thread (libc.so.6);??? (libgomp.so.1);??? (libgomp.so.1)", level="4b"),
    case("idle.openmp", "sleep", "clone3 (libc.so.6);gomp_thread_start (libgomp.so.1);gomp_barrier_wait (libgomp.so.1);syscall (libc.so.6)", level="4b"),
    case("idle.autograd", "sleep", "torch::autograd::Engine::thread_main (libtorch_cpu.so);torch::autograd::ReadyQueue::pop (libtorch_cpu.so);pthread_cond_wait (libc.so.6)"),
    case("idle.native_pool", "sleep", "clone3 (libc.so.6);blas_thread_server (libscipy_openblas64_.so);pthread_cond_wait@@GLIBC_2.3.2 (libc.so.6);__futex_abstimed_wait_common (libc.so.6)", level="4b"),
    case("idle.native_pool", "sleep", "clone3 (libc.so.6);thread_main (libtorch_cpu.so);syscall (libc.so.6)", level="4b"),
    case("idle.cuda_thread", "sleep", "clone3 (libc.so.6);0x7f01 (libcuda.so.1);poll (libc.so.6)", level="4b", comm="cuda-EvtHandlr"),
    case("sleep.native", "sleep", f"{THREAD}stay (life.py:38);time_sleep (libpython3.11.so.1.0);clock_nanosleep (libc.so.6)"),
    case("sleep.python", "sleep", "stay (life.py:38)", level="3", state="S", syscall="clock_nanosleep", has_gil=False),
    # files and sockets (made)
    case("io.native", "io", "read_rows (data.py:4);_io_FileIO_readinto (libpython3.11.so.1.0);read (libc.so.6)"),
    case("io.python", "io", "read_rows (data.py:4)", level="3", state="D", syscall="pread64", has_gil=False),
    case("io.wait", "io", "serve_forever (socketserver.py:235);_PollLikeSelector.select (selectors.py:415)", level="3", state="S", syscall="restart_syscall"),
    # at work on the CPU
    case(
        "compute.torch",
        "compute",
        f"{THREAD}multiply_torch (matmul.py:22);torch::autograd::THPVariable_tanh (libtorch_python.so);at::_ops::tanh::call (libtorch_cpu.so);"
        "at::native::AVX512::tanh_kernel (libtorch_cpu.so);at::TensorIteratorBase::for_each (libtorch_cpu.so);"
        "GOMP_parallel (libgomp.so.1);0x7ff9a581c19a (libgomp.so.1);0x7ff9a581deee (libgomp.so.1)",
    ),
    case("compute.torch", "compute", f"{ENGINE}at::native::layer_norm_backward_cpu (libtorch_cpu.so)"),
    case("compute.blas", "compute", f"{THREAD}multiply_torch (matmul.py:22);mkl_blas_def_sgemm_kernel_0_zen (libtorch_cpu.so)"),
    case("compute.blas", "compute", f"{THREAD}multiply_numpy (matmul.py:32);dgemm_beta_SKYLAKEX (libscipy_openblas64_-32a4b2a6.so);0x7f26 (libc.so.6)"),
    case("compute.openmp", "compute", "f (a.py:1);GOMP_parallel (libgomp.so.1);0x7ff9a581c19a (libgomp.so.1)"),
    case("compute.numpy", "compute", f"{THREAD}multiply_numpy (matmul.py:32);DOUBLE_tanh_X86_V4 (numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so)"),
    case("compute.tokenizer", "compute", "encode (tok.py:3);tokenizers::tokenizer::encode (tokenizers.abi3.so)"),
    # torch in between
    case("autograd.wait_queue", "autograd", "_engine_run_backward (torch/autograd/graph.py:865);torch::autograd::Engine::execute (libtorch_cpu.so);torch::autograd::Engine::thread_main (libtorch_cpu.so);torch::autograd::ReadyQueue::pop (libtorch_cpu.so);std::condition_variable::wait (libstdc++.so.6);pthread_cond_wait (libc.so.6);0x7f01 (libc.so.6)"),
    case("autograd.wait", "autograd", "_engine_run_backward (torch/autograd/graph.py:865);torch::autograd::Engine::execute (libtorch_cpu.so);pthread_cond_wait (libc.so.6)"),
    case(
        "dispatch.operator",
        "dispatch",
        "main (data_loader.py:30);torch::autograd::THPVariable_mean (libtorch_python.so);at::_ops::mean::call (libtorch_cpu.so);"
        "c10::impl::wrap_kernel_functor_unboxed_<&at::native::AVX2::mean_kernel, at::native::cpublas::gemm>::call (libtorch_cpu.so)",
    ),
    case("dispatch.operator", "dispatch", "at::_ops::add__Tensor::call (libtorch_cpu.so);at::TensorIteratorBase::build_borrowing_binary_op (libtorch_cpu.so)"),
    case("autograd.engine", "autograd", "main (data_loader.py:30);torch::autograd::generated::MeanBackward0::~MeanBackward0 (libtorch_cpu.so);torch::autograd::Node::~Node (libtorch_cpu.so)"),
    case("autograd.python", "autograd", "Tensor.backward (torch/_tensor.py:623);_engine_run_backward (torch/autograd/graph.py:865)", **RUNNING),
    case("dispatch.torch", "dispatch", "zero_grad (torch/optim/optimizer.py:1060);GetterBase<PropertyGrad>::getter (libtorch_python.so)"),
    # Python
    case("python.frame", "python", f"{THREAD}hold (gil_hog.py:19)"),
    case("python.gil", "python", "hold (gil_hog.py:19)", level="3", state="S", has_gil=True),
    case("python.running", "python", "hold (gil_hog.py:19)", level="3", state="R", has_gil=None),
    case("python.interpreter", "python", f"{THREAD}hold (gil_hog.py:19);time_perf_counter (libpython3.11.so.1.0)"),
    case("python.call", "python", f"{THREAD}hold (gil_hog.py:19);pthread_mutex_lock (libc.so.6);0x7fc94f0a412b (libc.so.6)"),
    # known to be unknown
    case("unknown.unwound", "other", "launch (fake_cuda.py:25);0x7f91178b7930 (?);0x2 (?);clock_gettime (libc.so.6);0x7f911844baff ([vdso])"),
    case("unknown.clock", "other", "hold (gil_hog.py:19);clock_gettime (libc.so.6);0x7fc94f821b46 ([vdso])"),
    case("unknown.asleep", "other", "convoy (lock_convoy.py:29)", **ASLEEP),
    case("unknown.outside_gil", "other", "multiply_torch (matmul.py:22)", **RUNNING),
    case("unknown.changed", "other", "hold (gil_hog.py:19)", level="3", state="", has_gil=False),
    # nothing fits
    case("", "other", "clone3 (libc.so.6);work (libmine.so);spin (libmine.so)", level="4b"),
    case("", "other", "", level="4"),
]  # fmt: skip


def frame(text: str) -> Frame:
    """``name (file:line)``."""
    found = re.fullmatch(r"(.*) \((.*?)(?::(\d+))?\)", text)
    assert found is not None, text
    name, file, line = found.groups()
    return Frame(name=name, file=file, line=int(line or 0), is_native=not file.endswith(".py"))


def stack(folded: str, level: LevelId = "4", tid: int = 1, **facts: Any) -> Stack:
    """Frames outermost first, with semicolons between them."""
    facts.pop("comm", None)
    frames = tuple(frame(text) for text in folded.split(";") if text)
    return Stack(level=level, pid=1, tid=tid, frames=frames, **facts)


@pytest.mark.parametrize(("rule", "category", "folded", "facts"), CASES)
def test_each_recorded_stack_has_its_category(rule: str, category: str, folded: str, facts: dict[str, Any]) -> None:
    """A stack goes where its thread was, by the rule that was written for it."""
    done = classify(stack(folded, **facts), facts.get("comm", ""))
    assert (done.rule, done.category) == (rule, category)


def test_every_rule_has_a_case() -> None:
    """A rule that no recorded stack reaches is not known to work."""
    ids = [rule.id for rule in default_rules().rules]
    assert set(ids) - {rule for rule, *_ in CASES} == set()
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z_]+\.[a-z_]+", id) for id in ids)


def test_every_category_has_a_rule() -> None:
    """None of the contract's categories is out of reach."""
    assert {rule.category for rule in default_rules().rules} == set(CATEGORIES)


@pytest.mark.parametrize(("rule", "category", "folded", "facts"), CASES)
def test_less_is_enough(rule: str, category: str, folded: str, facts: dict[str, Any]) -> None:
    """Names without their class (Python 3.10), files without folders, and addresses without digits give the same."""
    plain = re.sub(r"\([\w/.]+/(\w+\.py)", r"(\1", folded)
    plain = re.sub(r"(^|;)_?[A-Z]\w*\.(?=[^;]*\.py:)", r"\1", plain)
    plain = re.sub(r"0x[0-9a-f]+ ", "0x? ", plain)
    plain = re.sub(r"\([\w/.-]+/([\w.-]+\.so)", r"(\1", plain)
    assert classify(stack(plain, **facts), facts.get("comm", "")).category == category, plain


ORDER = [
    ("cuLaunchKernel (libcuda.so.1)", "launch"),
    ("cuLaunchKernel (libcuda.so.1);sched_yield (libc.so.6)", "launch_queue_full"),
    ("cuLaunchKernel (libcuda.so.1);sched_yield (libc.so.6);work (libmine.so)", "launch"),
    ("f (a.py:1);sched_yield (libc.so.6)", "python"),
    ("at::_ops::mm::call (libtorch_cpu.so);at::native::mm_cpu (libtorch_cpu.so)", "compute"),
    ("at::_ops::mm::call (libtorch_cpu.so);at::native::mm_cpu (libtorch_cpu.so);x (libtorch_cuda.so)", "dispatch"),
    ("f (a.py:1);time_perf_counter (libpython3.11.so);clock_gettime (libc.so.6);0x7f ([vdso])", "python"),
    ("f (a.py:1);wait (threading.py:3)", "lock"),
    ("get (queue.py:1);f (a.py:1);wait (threading.py:3)", "lock"),
    ("get (mine.py:1);wait (threading.py:3)", "lock"),
    ("f (a.py:1);pthread_cond_timedwait (libc.so.6);PyDict_New (libpython3.11.so.1.0)", "python"),
    ("work (libmine.so);pthread_cond_timedwait (libc.so.6)", "other"),
    ("f (a.py:1);std::condition_variable::wait_for (libmine.so);pthread_cond_timedwait (libc.so.6)", "other"),
    ("f (a.py:1);syscall (libc.so.6)", "other"),
]


@pytest.mark.parametrize(("folded", "category"), ORDER)
def test_order_and_place_decide(folded: str, category: str) -> None:
    """What stands first in the rules, or at the leaf, or directly above, makes the difference."""
    assert classify(stack(folded)).category == category


def test_what_runs_again_for_the_backward_pass_is_tagged() -> None:
    """Checkpointing nearer to the leaf than the engine is recomputation; in the forward pass it is not."""
    forward = "train (a.py:1);checkpoint (torch/utils/checkpoint.py:488);forward (m.py:1);at::_ops::mm::call (libtorch_cpu.so)"
    again = f"backward (torch/_tensor.py:1);{ENGINE}recompute (torch/utils/checkpoint.py:9);forward (m.py:1)"
    behind = "checkpoint (torch/utils/checkpoint.py:488);backward (torch/_tensor.py:1);" + ENGINE.rstrip(";")
    on_the_device_thread = (
        "_checkpoint_hook.__init__.<locals>.unpack_hook (torch/utils/checkpoint.py:1);forward (m.py:1)"
    )
    nested = (
        "CheckpointFunction.backward (torch/utils/checkpoint.py:340);_engine_run_backward (torch/autograd/graph.py:8)"
    )
    assert classify(stack(nested)).tags == ("autograd",)
    assert classify(stack(forward)).tags == ()
    assert classify(stack(again)).tags == ("autograd", "recompute")
    assert classify(stack(behind)).tags == ("autograd",)
    assert classify(stack(on_the_device_thread)).tags == ("autograd", "recompute")


def test_autograd_and_data_loading_are_tags_beside_the_category() -> None:
    """A launch inside the backward pass stays a launch, and is tagged."""
    launch = classify(stack(f"{ENGINE}cuLaunchKernel (libcuda.so.1)"))
    assert (launch.category, launch.tags) == ("launch", ("autograd",))
    assert classify(stack("cuLaunchKernel (libcuda.so.1)"), "pt_autograd_0").tags == ("autograd",)
    loading = classify(stack("_worker_loop (torch/utils/data/_utils/worker.py:1);f (a.py:1);poll (libc.so.6)"))
    assert (loading.category, loading.tags) == ("io", ("data_loading",))


def test_the_unmatched_share_stays_visible_beside_idle_threads() -> None:
    """A hundred threads that only sleep do not hide that nothing is known of the one that works."""
    sleeping = [stack(f"{THREAD}time_sleep (libpython3.11.so.1.0)", tid=100 + i, count=50) for i in range(100)]
    working = [stack("work (libmine.so)", count=15), stack(f"{THREAD}f (a.py:1)", count=35)]
    done, total = sort([*sleeping, *working], "4")
    assert len(done) == 102
    assert (total.samples, total.unmatched.value, total.is_weak) == (50, 0.3, True)
    assert total.unmatched.low < 0.3 < total.unmatched.high
    assert {name: figure.value for name, figure in total.categories.items()} == {"python": 0.7, "other": 0.3}
    assert total.categories["python"].rules == ("python.frame",)


def test_a_thread_asleep_at_one_place_is_idle_whatever_it_waits_for() -> None:
    """At level 3 a wait in C has no name; who never leaves it is as idle as a sleeper, and who comes and goes is not."""
    asleep = {"level": "3", "state": "S", "syscall": "futex", "has_gil": False}
    stuck = stack("Thread.run (threading.py:982)", tid=2, count=10, **asleep)
    busy = stack("f (a.py:1)", tid=1, count=10, level="3", state="R", has_gil=True)
    moving = [stack(f"f (a.py:{line})", tid=3, count=5, **asleep) for line in (1, 2)]
    changing = stack("Thread.run (threading.py:982)", tid=2, count=10, **{**asleep, "syscall": "clock_nanosleep"})
    assert sort([stuck, busy], "3")[1].unmatched.value == 0.0
    assert sort([stuck, changing, busy], "3")[1].unmatched.value == pytest.approx(1 / 3)
    assert sort([stuck, busy, *moving], "3")[1].unmatched.value == 0.5


def test_a_level_is_weak_above_a_fifth_only() -> None:
    """A fifth of unmatched samples is still allowed."""
    for unknown, is_weak in ((20, False), (21, True)):
        stacks = [stack("work (libmine.so)", count=unknown), stack("f (a.py:1)", count=100 - unknown)]
        assert sort(stacks, "4")[1].is_weak is is_weak


def test_if_all_threads_are_idle_they_are_what_is_reported() -> None:
    """Shares are over all threads where none does anything."""
    total = sort([stack("Queue.get (queue.py:171);Condition.wait (threading.py:327)", count=9)], "4")[1]
    assert (total.samples, total.categories["queue_wait"].value, total.is_weak) == (9, 1.0, False)


def test_no_stacks_say_nothing() -> None:
    """Without samples there are no shares, and the interval is all there is."""
    done, total = sort([], "4")
    assert (done, total.samples, total.categories, total.is_weak) == ([], 0, {}, False)
    assert total.unmatched.interval == (0.0, 1.0)


def test_other_levels_are_left_out_and_names_of_threads_are_used() -> None:
    """Only the level's own stacks are added up, and a rule may ask for the operating system's name."""
    folded = "clone3 (libc.so.6);0x7f01 (libcuda.so.1);poll (libc.so.6)"
    stacks = [stack(folded, level="4b"), stack("f (a.py:1)", level="4")]
    done, _ = sort(stacks, "4b", {(1, 1): "cuda-EvtHandlr"})
    assert [one.rule for one in done] == ["idle.cuda_thread"]
    assert [one.rule for one in sort(stacks, "4b")[0]] == ["io.native"]


def test_by_thread_gives_each_thread_its_own_shares() -> None:
    """Shares are of the thread's samples, with their interval and rules."""
    stacks = [
        stack("cuLaunchKernel (libcuda.so.1)", tid=1, count=80),
        stack("cuStreamSynchronize (libcuda.so.1)", tid=1, count=20),
        stack("f (a.py:1)", tid=2, count=7),
    ]
    threads = by_thread(map(classify, stacks))
    assert {name: figure.value for name, figure in threads[1, 1].items()} == {"sync": 0.2, "launch": 0.8}
    assert threads[1, 1]["launch"].rules == ("launch.kernel",)
    assert threads[1, 1]["launch"].samples == 100
    assert threads[1, 2]["python"].value == 1.0
    with pytest.raises(ValueError, match="several levels"):
        by_thread([stack("f (a.py:1)", level="3"), stack("f (a.py:1)", level="4")])


STACKS = st.lists(
    st.tuples(st.sampled_from(CASES), st.integers(1, 200), st.integers(1, 6)).map(
        lambda drawn: stack(drawn[0][2], tid=drawn[2], count=drawn[1], **{**drawn[0][3], "level": "4"})
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STACKS)
def test_shares_add_up_to_one(stacks: list[Stack]) -> None:
    """Whatever was seen, categories cover all of it once, for the level and for each thread."""
    done, total = sort(stacks, "4")
    for shares in (total.categories, *by_thread(done).values()):
        assert sum(figure.value for figure in shares.values()) == pytest.approx(1.0)
        assert all(
            figure.low <= figure.value + 1e-9 and figure.value <= figure.high + 1e-9 for figure in shares.values()
        )
    other = total.categories.get("other")
    assert total.unmatched.value == pytest.approx(other.value if other else 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(Frame, name=st.text(max_size=20), file=st.text(max_size=20), is_native=st.booleans()), max_size=6
    )
)
def test_any_frames_get_a_category(frames: list[Frame]) -> None:
    """No name or file makes it fail."""
    done = classify(Stack(level="4", pid=1, tid=1, frames=tuple(frames)))
    assert done.category in CATEGORIES
    assert (done.rule == "") <= (done.category == "other")


def test_thousands_of_stacks_take_no_time_to_speak_of() -> None:
    """5,000 different deep stacks are sorted in well under two seconds of this thread's time."""
    draw = random.Random(0)
    inner = [frame(text) for _, _, folded, _ in CASES for text in folded.split(";") if text]
    outer = [Frame(name=f"Module{i}.forward", file=f"torch/nn/modules/m{i % 50}.py", line=i) for i in range(500)]
    stacks = [
        Stack(level="4", pid=1, tid=i % 8, frames=(*draw.choices(outer, k=40), *draw.choices(inner, k=20)), count=1 + i)
        for i in range(5000)
    ]
    started = time.thread_time()
    sort(stacks, "4", rules=load_rules())
    assert time.thread_time() - started < 2.0


BAD = [
    ("[[rule]]\nid = 'a.b'\ncategory = 'sync'\nframe = ['x']", "frame"),
    ("[[rule]]\nid = 'a.b'\ncategory = 'syncing'\nframes = ['x']", "syncing"),
    ("[[rule]]\nid = 'a.b'\ncategory = 'sync'\nframes = ['x']\nwhere = 'top'", "top"),
    ("[[rule]]\nid = 'a.b'\ncategory = 'sync'\nframes = ['/(/']", "regular expression"),
    ("[[rule]]\nid = 'a.b'\ncategory = 'sync'", "no condition"),
    ("[[rule]]\ncategory = 'sync'\nframes = ['x']", "without an id"),
    (2 * "[[rule]]\nid = 'a.b'\ncategory = 'sync'\nframes = ['x']\n", "two rules"),
    ("", "no \\[\\[rule\\]\\]"),
    ("[[rule", "cannot be read"),
]


@pytest.mark.parametrize(("content", "says"), BAD)
def test_a_rule_that_cannot_be_is_refused(content: str, says: str, tmp_path: Path) -> None:
    """The message names the file and what is wrong."""
    file = tmp_path / "rules.toml"
    file.write_text(content)
    with pytest.raises(AttachError, match=says) as caught:
        load_rules(file)
    assert str(file) in str(caught.value)
    with pytest.raises(AttachError, match="cannot be read"):
        load_rules(tmp_path / "none.toml")


def test_own_rules_may_be_used(tmp_path: Path) -> None:
    """A file of a user's own takes the place of the package's."""
    file = tmp_path / "rules.toml"
    file.write_text("[[rule]]\nid = 'mine.spin'\ncategory = 'compute'\nframes = ['^spin @ libmine']\nwhere = 'leaf'\n")
    mine = load_rules(file)
    assert classify(stack("work (libmine.so);spin_up (libmine.so)"), rules=mine).rule == "mine.spin"
    assert classify(stack("spin (libmine.so);work (libmine.so)"), rules=mine).category == "other"
    assert classify(stack("spin (libmine.so)")).category == "other"

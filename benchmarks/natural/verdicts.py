# ruff: noqa: E501
"""What an expert says of each natural trace, from raw figures (raw.py), written before findings were run on it.

All times in ms. A trace without a cause (healthy, cut, or too little recorded to decide) is right if no finding of medium
or high confidence promises 5 % of the job. Patterns of ``never`` are causes that the raw figures rule out.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
"""No cause: stands in ``first`` next to patterns if both are acceptable."""


@dataclass(frozen=True)
class Verdict:
    """A trace and what is right to say of it.

    Attributes:
        trace: The path below the folder of traces; "tests/..." is below the root of the project.
        question: The analysis that is asked: findings, hangs (ranks) or memory-timeline (the holder at the peak).
        first: The acceptable first findings; of hangs the ranks, of memory the places.
        never: Patterns that are wrong at medium or high confidence.
        gain_ms: The least and the most that the job gains without the first cause.
        why: The raw figures that decide.
    """

    trace: str
    first: tuple[str, ...]
    why: str
    never: tuple[str, ...] = ()
    gain_ms: tuple[float, float] | None = None
    question: str = "findings"


_HOST = ("data-loading", "host-compute", "host-sync")
_IDLE = ("launch-bound", "device-waits", "idle-host", *_HOST)
_CALLS = ("slow-calls", "allocator")
_PEER = ("stragglers", "exposed-communication")

VERDICTS = (
    Verdict("critical_path/alexnet.json.gz", _CALLS,
            "12,854 of 12,920 ms are gaps: cudaFree 6,535 (cuDNN loads), cudaLaunchKernel 3,056 inside the calls, cudaMalloc"
            " 1,945, stream creation 735; 0.1 ms after a launch returned. Before the first device event 29.9 s of context creation.",
            ("device-waits", "host-compute", "data-loading", *_PEER), (3000, 43000)),
    Verdict("critical_path/simple_add.json.gz", _CALLS,
            "15,976 ms of gaps: cudaFree 7,999, cudaLaunchKernel 4,220, stream creation 475, cudaMalloc 293; 24.6 s of context"
            " creation before the first device event. 0.1 ms after a launch returned.",
            ("device-waits", "host-compute", "data-loading", *_PEER), (4000, 41000)),
    Verdict("critical_path/event_sync.json.gz", ("launch-bound", "host-sync", "warm-up", "idle-host"),
            "51 us of device work in a step of 3.15 ms; 2.2 ms in aten::empty before the first kernel (allocates, computes"
            " nothing); 212 us of gaps, 158 before the launch, 100 after a synchronization.",
            ("device-waits", "host-compute", "data-loading")),
    Verdict("critical_path/event_sync_multi_stream.json.gz", ("idle-host",),
            "One gap of 18.8 of 19.5 ms in which no operator or call is recorded (98 %): the host pauses. cudaMalloc 0.41 ms.",
            ("device-waits", "host-compute", "data-loading"), (18.0, 19.3)),
    Verdict("nccl_ddp/kineto_trace_0.json.gz", ("launch-bound",),
            "Busy 23.8 %; 503 of 660 ms are gaps, 472 before the launch call, 3,450 of them. unflatten_dense_tensors 67 ms is"
            " views (buffers broadcast in each forward). Communication alone 39 ms.",
            ("host-compute", "device-waits", "data-loading", "stragglers"), (250, 560)),
    Verdict("dlrm", ("launch-bound", "exposed-communication"),
            "Gaps 6.4 to 8.1 ms a rank, 5.0 to 6.6 before the launch call; communication alone 3.2 to 11.1 of 13 to 20 ms, longest"
            " where a rank begins early. The loader takes 1.0 ms on rank 3 only.",
            ("device-waits", "host-compute"), (2, 12)),
    Verdict("linear/kineto_trace_0.json.gz", ("launch-bound", *_CALLS),
            "Busy 37 %; 636 of 1,009 ms are gaps, 503 before the launch call and 126 inside; cudaFree 981 ms before the first"
            " device event creates the context. 6.7 ms after a launch returned.",
            ("device-waits", "host-compute", "data-loading"), (450, 1100)),
    Verdict("resnet_mismatch/kineto_trace_0.json.gz", ("data-loading",),
            "9,782 ms of gaps; the loader holds 6,660 ms of them (30 calls, 8,205 ms in all). cudaFree 1,211 and launch calls 837"
            " in the first convolution; pageable copies 630.",
            ("device-waits", "host-compute", *_PEER), (5000, 8300)),
    Verdict("simple_add/benchmark_simple_add_trace.json.gz", ("host-compute", *_CALLS),
            "16 us of device work; 109 ms of gaps, 46 in aten::mul and 41 in fill_ on the CPU (a cache is cleared); 19.58 s of"
            " context creation before the first device event.",
            ("device-waits", "data-loading"), (80, 19700)),
    Verdict("hta_misc/benchmark_result_924719_1679055439_trace.json.gz", (NONE, *_CALLS),
            "11.8 s of host, no device activity recorded; launch calls 5.2 s and cudaFree 1.7 s in first calls: without the"
            " device nothing says what they delay.", ("data-loading", "host-compute", "device-waits", *_PEER)),
    Verdict("hta_misc/compare_base.json.gz", (NONE,),
            "33 events of 745 ms, cut from a larger file: 272.5 of 272.8 ms of gaps end with a kernel whose launch is absent."
            " Nothing decidable.", ("launch-bound", *_HOST, *_PEER)),
    Verdict("hta_misc/compare_test.json.gz", (NONE,),
            "34 events, as compare_base.", ("launch-bound", *_HOST, *_PEER)),
    Verdict("hta_misc/distributed_info_not_found.json.gz", (NONE,),
            "Host operators of one step of 75.5 ms of a GPU job without its calls and device activities; reading of values"
            " (item) 4.8 ms is the largest suspicion. Nothing decidable.", ("data-loading", "host-compute", *_PEER)),
    Verdict("hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz", ("slow-calls",),
            "8.76 of 8.91 ms are gaps: 6.6 ms inside one hipLaunchKernel (a kernel is loaded), 2.0 before other launches.",
            ("device-waits", "host-compute", "data-loading"), (6.0, 7.0)),
    Verdict("hta_misc/negative_queue_a100.json.gz", ("device-waits", "exposed-communication"),
            "Busy 35.6 %; 793 of 1,231 ms are gaps, 690 after the launch returned (launched up to 162 ms ahead), 10.6 before the"
            " launch. cudaMemcpyAsync 767 ms waits for the device, not the device for it. Communication alone 185 ms.",
            ("launch-bound", *_HOST), (180, 760)),
    Verdict("hta_misc/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", (NONE, "fp32-gemm", "elementwise-chains"),
            "Busy 98.4 %; gaps 3.6 of 480 ms; no communication. A healthy loop of convolutions in fp32 on a V100.",
            (*_IDLE, *_PEER)),
    Verdict("hta_misc/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", (NONE,),
            "16 events: ten gloo:all_reduce that outlast each other, no device. Nothing decidable.", (*_IDLE, "stragglers")),
    Verdict("hta_misc/triton_example.json.gz", (NONE, "idle-host"),
            "8 events; one kernel of 2 us in an annotated step of 13.3 s, of which 1.4 ms are recorded.",
            ("launch-bound", "device-waits", *_HOST)),
    Verdict("hta_multirank", ("exposed-communication", "device-waits"),
            "Communication alone 336 and 299 of 1,230 ms; gaps 675 and 651, of which 392 and 330 after the launch returned. Events"
            " were sampled: 97 to 99 % of the longest gaps show no operator, and _foreach_mul_ (241 ms) has lost its launches.",
            ("host-compute", "data-loading", "host-sync"), (60, 720)),
    Verdict("tracelens/b200_eager.json.gz", ("launch-bound",),
            "Busy 13.7 %; 72.9 of 84.5 ms are gaps, 63.6 before the launch call and 7.1 inside; vLLM runs a prefill eagerly.",
            ("device-waits", "host-compute", "data-loading"), (45, 76)),
    Verdict("tracelens/h100_qwen.json.gz",
            (NONE, "copies", "elementwise-chains", "slow-operators", "launch-bound"),
            "Busy 91.9 %; gaps 3.8 of 49.7 ms (1.1 above 50 us). Products 12.8 ms; products of elements 5.6, layout copies 3.9,"
            " concatenation 2.9, sums 2.4 could be fused.", ("device-waits", "host-compute", "data-loading")),
    Verdict("tracelens/mi300_qwen.json.gz",
            (NONE, "copies", "elementwise-chains", "slow-operators", "launch-bound"),
            "Busy 91.5 %; gaps 4.0 of 47.1 ms, 2.5 before the launch call (one stretch after a synchronization). Else as h100_qwen.",
            ("device-waits", "host-compute", "data-loading")),
    Verdict("tracelens/mi210_gpu_only.json.gz",
            (NONE, "copies", "elementwise-chains", "slow-operators", "launch-bound"),
            "Busy 89.4 %; gaps 0.64 of 5.98 ms, 0.43 before the launch; transposes 0.35 ms.", ("device-waits", *_HOST)),
    Verdict("tracelens/mi300_vllm_graph_execution.json.gz", (NONE, "slow-operators"),
            "From the first to the last device event busy 99.8 %; 8.37 ms before it are unknown (the host runs ahead). A graph of 32"
            " requests.", (*_IDLE, "scheduler-bubbles", "small-decode-batches")),
    Verdict("serving/vllm_decode_full/capture_traces/graph_capture_rank_0.1773709742341309550.pt.trace.json.gz",
            (NONE, "launch-bound", "idle-host"),
            "A graph is captured (59 ms, 29 us of device work): moe_forward 34 ms launches into the capture and computes nothing on"
            " the host.", ("device-waits", "host-compute", "data-loading")),
    Verdict("serving/xdit_flux.1/capture_traces/capture_trace_rank_0.json.gz", ("recompilation", "warm-up", "launch-bound"),
            "332 of 397 ms are gaps; 305 in five: 243 while CUDAGraphNode.record captures, all in one compiled region, once.",
            ("device-waits", "data-loading", "host-sync"), (180, 335)),
    Verdict("cpu/coll_4", (*_PEER, "small-collectives"),
            "One collective of each kind on four CPU ranks: wait_tensor 41 to 79 of 208 to 311 ms; rank 3 begins some 70 ms earlier.",
            ("data-loading", "recompilation", "host-compute")),
    Verdict("cpu/compile", (NONE,), "105 events in 3.4 ms: one compiled step (0.83 ms), already compiled.",
            ("recompilation", "data-loading", *_PEER)),
    Verdict("cpu/ddp_2", ("stragglers", "copies", "tiny-operators", "oversubscription", "slow-operators"),
            "Rank 0 waits 44.7 ms in all_reduce, rank 1 18.7: rank 1 is late by some 26 of 222 ms (AdamW 94.7 against 62.9 ms)."
            " aten::to and what it calls takes 45 to 56 ms in 586 calls.", ("data-loading", "recompilation")),
    Verdict("cpu/mt_bwd", (NONE,), "33 events, one step; the first product takes 7.5 ms.", ("data-loading", *_PEER)),
    Verdict("cpu/mt_bwd_allthreads", (NONE,), "112 events, one step; the first product takes 15 ms.", ("data-loading", *_PEER)),
    Verdict("cpu/pp_4", _PEER,
            "Four stages: gloo:recv 334, 340, 320 and 135 of 680 to 777 ms: the stages wait for each other (the bubble).",
            ("data-loading", "recompilation"), (60, 340)),
    Verdict("tests/data/ddp_2", (*_PEER, "oversubscription", "warm-up"),
            "Step 1 takes 278 ms, step 2 49: as_strided stalls for 92 ms on rank 0, one product for 95 on rank 1, while the other"
            " rank waits in a collective.", ("data-loading", "recompilation")),
    Verdict("tests/data/gpu_small", ("launch-bound",),
            "Busy 4.1 %; 4.26 of 4.45 ms are gaps, 3.53 before the launch call and 0.62 inside.",
            ("device-waits", "host-compute", "data-loading"), (2.4, 4.5)),
    Verdict("nsys/h100_2gpu_1s.sqlite.gz", ("copies",),
            "Busy 99.3 %, but 921 of 969 ms are 225 copies from the host to each device (25.5 GB, FSDP with parameters on the CPU);"
            " kernels 22 ms. cudaStreamSynchronize 428 ms waits for them.",
            (*_IDLE, "stragglers", "fp32-gemm"), (800, 945)),
    Verdict("xplane/jax_conv_mi300.xplane.pb", ("launch-bound", "idle-host", "slow-calls", "idle-devices"),
            "Devices of eight idle for most of the recording; not computed here from the raw file, so without a gain.",
            ("data-loading", "stragglers")),
    *(
        Verdict(f"kernels/standalone/{name}.json.gz", (NONE, "slow-operators"), why, (*_IDLE, *_PEER))
        for name, why in (
            ("conv_01_large_spatial_small_ch", "One kernel of 4.5 ms, 3 events."),
            ("conv_04_depthwise", "One kernel of 0.35 ms, 3 events."),
            ("conv_05_pointwise_1x1", "One kernel of 0.6 ms, 3 events."),
            ("elem_01_add_poor_bw", "Ten sums of 0.42 ms, no gap; the host waits in two synchronizations at the end."),
            ("gemm_01_compute_few_tiles", "Ten products of 1.08 ms, no gap."),
            ("gemm_04_memory_tall_skinny", "Ten products, one gap of 9 us; 6.6 ms before the first device event are unknown."),
            ("moe_01_many_experts_few_tokens", "One kernel of 0.28 ms, 3 events."),
            ("moe_03_top1_sparse", "One kernel of 0.95 ms, 3 events."),
            ("sdpa_01_long_seq_low_eff", "Ten attentions of 66 ms, no gap."),
        )
    ),
    Verdict("kernels/standalone/moe_04_top2_dense.json.gz", (NONE, "slow-operators", "launch-bound", "device-waits"),
            "One kernel of 1.8 of 2.8 ms; three gaps of 0.3 ms before kernels without a recorded launch.", (*_HOST, *_PEER)),
    Verdict("kernels/standalone/sdpa_03_short_seq_overhead.json.gz", (NONE, "slow-operators", "device-waits"),
            "Ten attentions of 0.11 ms; gaps 0.29 of 1.37 ms after the launches returned. The last call seems to end 657 ms later.",
            ("launch-bound", "idle-host", *_HOST)),
    Verdict("flight_recorder/gpu_error_2nd", ("9", "14"), "The log of the fault injection.", question="hangs"),
    Verdict("flight_recorder/lock_gil_1st", ("9", "14"), "The log of the fault injection.", question="hangs"),
    Verdict("memory/gpt2700m_ctx128_forward.pickle.gz", ("functional.py:407", "transformer.py"),
            "At the peak of 19.50 GB (13.77 from before) einsum holds 2.24 GB, the next line 1.34.", question="memory-timeline"),
    Verdict("memory/gpt2700m_ctx128_full_step.pickle.gz", ("optimizers.py:82", "optimizers.py:84", "bmm", "BmmBackward0"),
            "At the peak of 55.08 GB two lines of the optimizer hold 13.627 GB each, bmm 13.558.", question="memory-timeline"),
    Verdict("memory/gpt2700m_ctx256_forward_bf16.pickle.gz", ("functional.py:407", "transformer.py"),
            "At the peak of 28.40 GB einsum holds 10.35 GB, the next line 1.34.", question="memory-timeline"),
    Verdict("memory/medium_256_training.pickle.gz", ("functional.py:373", "model.py"),
            "At the peak of 9.11 GB (5.10 from before) einsum holds 0.95 GB, silu 0.81.", question="memory-timeline"),
    Verdict("memory/small_finetune.pickle.gz", ("_functions.py:509",),
            "At the peak of 5.89 GB a forward outside of torch holds 0.99 GB, silu 0.50.", question="memory-timeline"),
)  # fmt: skip

"""Name patterns that etloom recognizes: iterations and engines, graph captures, kernel families, communication kernels.

`etloom.core.names` compiles the rows, behind those of the user's files (``--names FILE.yaml``), which have the same
sections. This is Python, not YAML, because every process that opens a run needs it and a YAML parser takes 30 ms.
"""

from __future__ import annotations

SERVING = "a serving engine"
"""Engine of an iteration known by an annotation only: forks and tools write the annotations of other engines, too."""

# The event that spans an iteration of an inference engine, by a regular expression over its name.
#   category: annotation (default), python (a frame) or module (a call of an nn.Module).
#   phase: prefill, decode, mixed or denoise, if the name alone implies it.
#   Groups of the expression: number, phase, requests, tokens, prefill_requests, decode_requests, prefill_tokens,
#   decode_tokens, steps; for the cost of attention prefill_keys, decode_keys (sums), prefill_squares (of query
#   lengths), prefill_products, decode_products (of query and key lengths).
# The first row that matches an event of a trace is used; within an iteration, others do not count.
_ITERATIONS = [
    {
        "engine": SERVING,
        "pattern": r"^execute_context_(?P<prefill_requests>\d+)\((?P<prefill_tokens>\d+)(?:_\d+)?\)"
        r"_generation_(?P<decode_requests>\d+)\((?P<decode_tokens>\d+)(?:_\d+)?\)",
    },
    {  # ROCm's fork: sums of query lengths (sq), of key lengths (sk) and of their products
        "engine": SERVING,
        "pattern": r"^execute_(?P<tokens>\d+)"
        r"_context_(?P<prefill_requests>\d+)\(sq(?P<prefill_tokens>\d+)sk(?P<prefill_keys>\d+)"
        r"sqsq(?P<prefill_squares>\d+)sqsk(?P<prefill_products>\d+)\)"
        r"_generation_(?P<decode_requests>\d+)\(sq(?P<decode_tokens>\d+)sk(?P<decode_keys>\d+)"
        r"sqsq\d+sqsk(?P<decode_products>\d+)\)",
    },
    {"engine": SERVING, "pattern": r"^execute_new_(?P<prefill_requests>\d+)_cached_(?P<decode_requests>\d+)"},
    {
        "engine": SERVING,
        "pattern": r"^\[Executor\] _forward_step (?P<number>\d+): (?P<prefill_requests>\d+) ctx reqs"
        r"(?:, (?P<prefill_tokens>\d+) ctx (?:tkns|tokens))?, (?P<decode_requests>\d+) gen reqs",
    },
    {
        "engine": SERVING,
        "pattern": r"^step\[(?P<phase>[A-Z_]+) bs=(?P<requests>\d+)(?: toks=(?P<tokens>\d+))?",
    },
    {
        "engine": SERVING,
        "pattern": r"(?i)^denois(?:e|ing)[ _-]?step[ _#:-]*(?P<number>\d+)",
        "phase": "denoise",
    },
    # A training step: jax.profiler.StepTraceAnnotation
    {"engine": "JAX", "pattern": r"#step_num=(?P<number>\d+)$"},
    {
        "engine": "vLLM",
        "category": "python",
        "pattern": r"vllm/(?:v1/)?worker/(?:gpu_)?worker(?:_base)?\.py\(\d+\): execute_model$",
    },
    {
        "engine": "vLLM",
        "category": "python",
        "pattern": r"vllm/(?:v1/)?worker/(?:gpu_)?model_runner\.py\(\d+\): execute_model$",
    },
    {
        "engine": "SGLang",
        "category": "python",
        "pattern": r"sglang/srt/managers/scheduler\.py\(\d+\): run_batch$",
    },
    {
        "engine": "SGLang",
        "category": "python",
        "pattern": r"sglang/srt/model_executor/model_runner\.py\(\d+\): forward(?P<phase>_decode|_extend)?$",
    },
    {
        "engine": "TensorRT-LLM",
        "category": "python",
        "pattern": r"tensorrt_llm/_torch/pyexecutor/py_executor\.py\(\d+\): _forward_step$",
    },
    {
        "engine": "xDiT",
        "category": "module",
        "pattern": r"^nn\.Module: xFuser\w*(?:Transformer|UNet)\w*_\d+$",
        "phase": "denoise",
    },
    {
        "engine": "diffusers",
        "category": "module",
        "pattern": r"^nn\.Module: \w*(?:Transformer[23]D\w*|UNet\w*ConditionModel|DiT\w*Model)_\d+$",
        "phase": "denoise",
    },
]

# Engine of iterations that are `SERVING`, by operators, modules, frames and kernels. The first row that matches any
# name of the trace is used: SGLang runs kernels of vLLM, and both run kernels of TensorRT-LLM. Rust's regex.
_ENGINES = [
    {
        "engine": "SGLang",
        "pattern": r"\b(?:sglang|sgl_kernel)::|\bsglang/(?:srt|jit_kernel|multimodal_gen)/|\bsgl_kernel/",
    },
    {
        "engine": "vLLM",
        "pattern": r"\bvllm::|^_(?:C_cache_ops|moe_C|rocm_C|vllm_fa\d_C)::"
        r"|\bvllm/(?:v1|worker|model_executor|engine|executor|attention|distributed|entrypoints|compilation)/",
    },
    {"engine": "xDiT", "pattern": r"\bxfuser/|\bxFuser"},
    {"engine": "diffusers", "pattern": r"\bdiffusers/(?:models|pipelines|schedulers)/"},
    {"engine": "TensorRT-LLM", "pattern": r"\b(?:trtllm|tensorrt_llm)(?:::|/)"},
]

# Batch size in the name of the annotation around the capture of a device graph.
_CAPTURES = [{"pattern": r"^capture_(?P<tokens>\d+)(?:_|$)"}]

# (family, pattern) of kernels whose operator does not determine it (FAMILIES of etloom.core.names), by the kernel's own
# name without its parameters. The syntax is that of Rust's regex: no look-around.
_FAMILIES = [
    (
        "ssm",
        r"(?i)selective_scan|chunk_(?:scan|state|fwd|cumsum)|state_passing|delta_rule|mamba|causal_conv1d|wkv",
    ),
    ("routing", r"(?i)topk_?gating"),
    (
        "moe",
        r"(?i)(?:fused|group(?:ed)?)_?(?:fused)?_?moe(?:_kernel|_gemm|_mlp|$)|ck_?moe|moe_(?:ck2?)?stage|moe_?gemm|(?:^|[^a-z])fmoe",
    ),
    ("loss", r"(?i)cross_?entropy|nll_loss|mse_loss|kl_div"),
    (
        "optimizer",
        r"(?i)Fused(?:Adam|Sgd|Adagrad|Lamb|Optimizer)|(?:Adam|Lamb|SGD|NovoGrad)(?:W|Stage\d)?Functor|fused_adam",
    ),
    ("embedding", r"(?i)embedding_(?:codegen|backward|bag|dense)|index_?select|gather_kernel"),
    # It writes keys and values to cache pages; the name contains the attention backend whose layout it is.
    ("copy", r"(?i)reshape_and_cache"),
    (
        "attention",
        r"(?i)flash(?:$|[^i]|i[^n])|fmha|attention|attn_|_attn|sdpa|Batch(?:Decode|Prefill)With|paged_?kv|_mla|mla_"
        r"|^_fwd_grouped_kernel_stage|^_fwd_kernel_stage",
    ),
    (
        "convolution",
        r"(?i)conv(?:olution|\dd|_)|im\dd2col|col2im|fprop|dgrad|wgrad|winograd|implicit_gemm|igemm_(?:fwd|bwd|wrw)|scudnn|fft2d"
        r"|nchwToNhwc|nhwcToNchw",
    ),
    (
        "gemm",
        r"(?i)(?:^|[^b]|[^f]b)gemm|gemv|marlin|nvjet|^Cijk_|^bmm_|splitKreduce|_matmul|dot_kernel|^triton_tem_",
    ),
    ("normalisation", r"(?i)(?:layer|batch|group|rms|instance)_?norm|bn_fw|bn_bw|flashinfer::norm"),
    ("softmax", r"(?i)softmax"),
    ("reduction", r"(?i)reduce_kernel|_reduce_|reduction|^triton_(?:red|per)_|DeviceReduce"),
    ("copy", r"(?i)^mem(?:cpy|set)|copybuffer|fillbuffer|copy_kernel|direct_copy|CatArray|FillFunctor"),
    ("elementwise", r"(?i)elementwise|multi_tensor_apply|^triton_(?:poi_|for_|_\d)|triton_poi"),
    ("rope", r"(?i)rotary|(?:^|[^a-z])rope(?:$|[^a-z])"),
    ("elementwise", r"(?i)act_and_mul|silu|gelu|swiglu"),
    ("attention", r"(?i)^reduce_segments|merge_attn|merge_states?"),
    ("quantization", r"(?i)quant|fp8|mxfp4|block_scale"),
    ("embedding", r"(?i)fbgemm_gpu::|permute_pooled_embs|linearize_index|bounds_check_indices|bucketize"),
    (
        "routing",
        r"(?i)routing|moe::dev::|moe_?(?:align|sum|finalize|permute|sort)|expand_?input_?rows|finalize_?moe"
        r"|bitmatrix|expert|gating|ep::layout",
    ),
    ("pooling", r"(?i)(?:max|avg|average)_?pool|_pool_|Pooling|adaptive_average_pool"),
    ("sorting", r"(?i)\bcub::|\bthrust::|radix|bitonic|sort|scan_?kernel|top_?k|sampling|argmax|cumsum"),
    ("copy", r"(?i)transpose|permute|SubTensorOpWith|copy_page|scatter|gather|concat|pad_"),
    # XLA's fusions on GPUs: loop_add_fusion_3, wrapped_convert
    ("elementwise", r"^(?:loop_|input_|wrapped_)\w|_fusion(?:_\d+)?(?:\.kd)?$"),
    ("waiting", r"(?i)spin_kernel|nanosleep|_sleep|wait_value"),
]

# Kernels of communication besides those that etloom.core.categories recognizes (NCCL, RCCL, NVSHMEM, DeepEP, ...).
# computes: the kernel also computes this; which share of its time is unknown.
_COMMUNICATION = [
    {"pattern": r"(?i)all_?reduce\w*_?(?:rms_?norm|norm|residual|fusion)", "computes": "normalisation"},
    {"pattern": r"(?i)(?:rms_?norm|residual)\w*_?all_?(?:reduce|gather)", "computes": "normalisation"},
    {"pattern": r"^(?:void\s+)?(?:\w+::)*(?:k?userbuffers_|multimem_)"},
]

KNOWN_NAMES: dict[str, list[dict[str, str]]] = {
    "iterations": _ITERATIONS,
    "engines": _ENGINES,
    "captures": _CAPTURES,
    "families": [{"family": family, "pattern": pattern} for family, pattern in _FAMILIES],
    "communication": _COMMUNICATION,
}

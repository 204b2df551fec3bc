"""Serves GGUF files by llama.cpp until it is ended."""

import argparse
import os
import threading


def main() -> None:
    import xllamacpp

    args = _arguments()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = args.model, args.port, ["127.0.0.1"]
    params.n_parallel, params.n_ctx = args.rows, args.rows * args.context
    params.kv_unified = False
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    params.cpuparams.n_threads = threads
    params.endpoint_metrics = params.endpoint_props = True
    if args.exact:
        # As it comes, keys, values and some sums of its flash attention are float16.
        kind = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_k = params.cache_type_v = kind
        flash = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if args.draft:
        method = f"COMMON_SPECULATIVE_TYPE_{args.method}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, method)]
        draft = params.speculative.draft
        draft.mparams.path = args.draft
        draft.n_max, draft.n_min, draft.p_min = args.tokens, 0, 0.0  # whole rounds
        draft.cpuparams.n_threads = threads
        if args.exact:
            draft.cache_type_k = draft.cache_type_v = kind
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}", flush=True)
    threading.Event().wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--exact", action="store_true", help="float32 throughout")
    parser.add_argument("--draft")
    parser.add_argument("--method")
    parser.add_argument("--tokens", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()

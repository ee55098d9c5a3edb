#!/usr/bin/env bash
# The first hours of this repository on a GPU, the most valuable first. README.md beside this file says what it asks.
#     bash results/gpu/day.sh                     everything that is not done yet
#     MINUTES=9 bash results/gpu/day.sh           nine minutes of it; the next call goes on
#     bash results/gpu/day.sh 'exo|decode'        only the pieces whose names match
#     SIZE=tiny bash results/gpu/day.sh           the same in tiny shapes, on a CPU too: a test of this script
#
# A piece writes OUT_DIR/NAME.txt (runs/day-out) and at its end NAME.ok or NAME.failed, by which it is skipped later:
# delete NAME.failed to try again. A piece that was stopped starts again; runs (in RUNS, runs/day) are resumed.
set -u
cd "$(dirname "$0")/../.."
deadline=$((${MINUTES:-1000} * 60)) only=${1:-.} out=${OUT_DIR:-runs/day-out} runs=${RUNS:-runs/day} jobs=${JOBS:-8}
small="" least=200 contexts="1024 8192 32768" shape="--rounds 5"
study="--seeds 3 ${PRESET:+--preset $PRESET --dtype auto}"
if [ "${SIZE:-full}" = tiny ]; then
    small="--n_layer 2 --d_model 64 --n_head 2" least=20 contexts="16 32 --new_tokens 4"
    shape="$small --d_ff 128 --vocab_size 512 --seq_len 64 --batch 2 --rounds 2 --no-compile"
    study="--seeds 1 --steps 20 40 --systems gpt muddformer $small --eval_tokens 4096"
fi
mkdir -p "$out" "$runs"
export out runs jobs small study PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/runs/inductor}

piece() {       # NAME COMMAND...: runs it unless it is done, for the time that is left, which is `need` seconds or more
    local name=$1 left=$((deadline - SECONDS)) began=$SECONDS code
    shift
    [[ $name =~ $only && ! -e $out/$name.ok && ! -e $out/$name.failed ]] || return
    [ $left -ge ${need:-20} ] || { echo "no time left before $name: call again"; exit 0; }
    timeout -k 10 $left bash -c 'trap "sleep 60" TERM; "$@"' . "$@" > "$out/$name.txt" 2>&1     # then all is killed
    code=$?
    case $code in 0) touch "$out/$name.ok" ;; 124 | 137) ;; *) touch "$out/$name.failed" ;; esac   # 124, 137: stopped,
    [ $code -lt 124 ] || find "$TORCHINDUCTOR_CACHE_DIR" -name '*.so' -mmin -2 -delete             # maybe while linking
    echo "== $name: exit $code after $((SECONDS - began)) s
$(tail -n "${show:-3}" "$out/$name.txt" | cut -c 1-300)"
}

losses() {      # TOLERANCE RUN RUN: whether the losses of two runs differ by no more than that; their step times
    python3 - "$@" <<'P'
import json, sys
steps = [[x for x in map(json.loads, open(f"{run}/log.jsonl")) if x["kind"] == "train"] for run in sys.argv[2:]]
a, b = ([x["loss"] for x in run] for run in steps)
worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
print(f"{len(a)} steps, losses {a[0]:.4f} to {a[-1]:.4f}; largest difference {worst:.3g}, allowed {sys.argv[1]}")
print("median step:", *(f'{sorted(x["ms"] for x in run)[len(run) // 2]:.1f} ms' for run in steps))
sys.exit(worst > float(sys.argv[1]))
P
}

first() {       # MODEL: five steps compiled on this device, and eager in fp32 on the CPU
    local a=$runs/first-$1 b=$runs/first-cpu-$1
    local flags="--model $1 --n_layer 4 $small --max_steps 5 --warmup_steps 1 --eval_every 5 --eval_tokens 8192"
    rm -rf "$a" "$b"
    python3 train.py $flags --compile --out "$a" && python3 train.py $flags --device cpu --dtype fp32 --out "$b" &&
        losses 0.07 "$a" "$b"
}

resume() {      # a run, and the same run killed and resumed
    local a=$runs/whole b=$runs/killed pid
    local flags="$small --deterministic --max_steps 60 --warmup_steps 10 --eval_every 30 --save_every 10"
    rm -rf "$a" "$b"
    python3 train.py $flags --out "$a" || return 1
    python3 train.py $flags --out "$b" & pid=$!
    until grep -qs '"step": 25' "$b/log.jsonl" || ! kill -0 $pid 2> /dev/null; do sleep 0.1; done
    kill -9 $pid; wait $pid
    python3 train.py --resume "$b" && losses 0 "$a" "$b"
}

graphs() {      # a small model without and with CUDA graphs, which launch all kernels of a pass at once
    local a=$runs/launched b=$runs/graphs
    local flags="--preset study --dtype fp32 $small --compile --max_steps 200 --eval_tokens 65536"
    rm -rf "$a" "$b"
    python3 train.py $flags --out "$a" && TORCHINDUCTOR_CUDAGRAPHS=1 python3 train.py $flags --out "$b" &&
        losses 0.1 "$a" "$b"
}

study() {       # NAME: the study, by several processes that share it, and share the GPU by MPS if there is one
    local code mps=$runs/mps results=$out/$1
    mkdir -p "$mps" "$results"
    [ -z "${START:-}" ] || cp -n "$START"/runs.csv "$START"/logs.jsonl.xz "$results"
    export CUDA_MPS_PIPE_DIRECTORY=$(realpath "$mps") CUDA_MPS_LOG_DIRECTORY=$(realpath "$mps")
    unset PYTORCH_CUDA_ALLOC_CONF                           # untried with CUDA graphs and MPS together
    nvidia-cuda-mps-control -d || pgrep nvidia-cuda-mps > /dev/null || unset CUDA_MPS_PIPE_DIRECTORY
    TORCHINDUCTOR_CUDAGRAPHS=1 python3 results/study/study.py --data "${DATA:-stdlib}" --results "$results" \
        --out "$runs/$1" --scales ${SCALES:-1} --jobs "$jobs" $study
    code=$?
    wc -l "$results/runs.csv"
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control
    return $code
}
export -f losses first resume graphs study

bench() {       # NAME SIDE FLAGS OPTIONS MODEL...: bench.py with each model beside its gpt, then what predicted it;
                # before, SIDE of them (0: none) compile at once
    local name=bench-$1 side=$2 flags="$3 --new_tokens 0 $shape" options=$4 model file need=$least show=6
    shift 4
    for model in "$@"; do
        [ "$side" -gt 0 ] || break
        while [ "$(jobs -pr | wc -l)" -ge "$side" ]; do wait -n; done
        piece "compile-$name-${model//[:=]/-}" python3 bench.py $flags --rounds 1 --models "$model$options" &
    done
    wait
    for model in "$@"; do
        file=$name-${model//[:=]/-}
        piece "$file" bash -c "python3 bench.py $flags --models $model$options --json '$out/$file.json' &&
            { grep -E '^\| (model|$model) \|' results/bench/h100.md || true; }"
    done
}

with() {        # NAME MODEL PYTHON: bench.py at exo-450m after a line of Python, with a compiler's cache of its own
    local need=$least run="import runpy, sys, torch._inductor.config; $3; sys.argv[0] = 'bench.py'"
    TORCHINDUCTOR_CACHE_DIR=$TORCHINDUCTOR_CACHE_DIR-$1 piece "with-$1" python3 -c "$run
runpy.run_path('bench.py', run_name='__main__')" $exo --new_tokens 0 $shape --models "$2" --json "$out/with-$1.json"
}

gpt2="--preset gpt2-124m --batch 32" exo="--preset exo-450m --vocab_size 57664 --batch 16"
piece machine bash -c '[ -e data/stdlib ] || python3 data_prep.py stdlib; nvidia-smi; date -u; git log -1 --format=%h
    python3 -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)" || true'
for model in $(cd models && ls [a-z]*.py); do                   # side by side, each with two processes that compile
    while [ "$(jobs -pr | wc -l)" -ge "$jobs" ]; do wait -n; done
    TORCHINDUCTOR_COMPILE_THREADS=2 piece first-${model%.py} first ${model%.py} &
done
wait
piece resume resume
piece graphs graphs
bench 124m 3 "$gpt2" :qk_norm=false gpt resformer satformer denseformer gpt:gate=elementwise exoformer \
    exoformer_dynamic nuresformer muddformer attnres_block:block_size=8 attnres hyperconnections
bench exo-450m 0 "$exo" "" gpt resformer exoformer exoformer_dynamic muddformer denseformer attnres
with cudnn gpt "torch.backends.cuda.enable_flash_sdp(False)"
with flash gpt "torch.backends.cuda.enable_cudnn_sdp(False)"
with reads-20 denseformer "torch._inductor.config.triton.mix_order_reduction_max_reads = 20"
TORCHINDUCTOR_COMPILE_THREADS=2 piece study${PRESET:+-$PRESET} study study${PRESET:+-$PRESET}
[ -n "$small" ] || piece tests python3 -m pytest -q -n "$jobs" --dist loadfile tests/scripts
piece decode python3 bench.py --preset exo-450m $shape --models sambay --decode $contexts --json "$out/decode.json"
piece profile python3 bench.py $exo $shape --models muddformer --profile "$out/profile.json"
bench mudd-405m 0 "--preset mudd-405m --batch 16" "" denseformer muddformer attnres
bench 124m 0 "$gpt2" :qk_norm=false mhc           # last: it takes longest to compile
echo "all pieces tried; results in $out"

#!/usr/bin/env bash
# What waits for a GPU, the most valuable first, in pieces: each writes what it has finished, and goes on when called again.
#     bash results/gpu/day.sh                     everything that is not done yet: hours of an H100 or H200
#     LIMIT=540 bash results/gpu/day.sh           540 seconds of it; the next call goes on
#     bash results/gpu/day.sh '^study-30m$'       only the pieces whose names match
#     SIZE=tiny bash results/gpu/day.sh           the same in tiny shapes, on a CPU too: a test of this script
# LARGE (prose) and SMALL (wiki) name the texts of the 30M and the small study: folders of data/, or they are made from
# the .txt.xz files and vocabularies in TEXTS. JOBS: runs at the same time. NANOGPT and FACTORY: clones of the peers.
# A piece writes OUT_DIR/NAME.txt (runs/day-out) and at its end NAME.ok or NAME.failed, by which it is skipped later:
# delete NAME.failed to try again. Runs (in RUNS, runs/day) are resumed. What the first days found: results/bench/h100.md.
set -u
cd "$(dirname "$0")/../.."
limit=${LIMIT:-100000} only=${1:-.} out=${OUT_DIR:-runs/day-out} runs=${RUNS:-runs/day} jobs=${JOBS:-6}
small="" ends="500 1000" short="500 1000 2000" peers=""
if [ "${SIZE:-full}" = tiny ]; then
    small="--n_layer 2 --d_model 64 --n_head 2 --seq_len 64 --batch_tokens 1024 --eval_tokens 4096 --no-compile"
    ends="20 40" short="20 40" peers="--tiny" LARGE=${LARGE:-stdlib} SMALL=${SMALL:-stdlib}
fi
mkdir -p "$out" "$runs"
export out runs jobs small PYTHONUNBUFFERED=1 LARGE=${LARGE:-prose} SMALL=${SMALL:-wiki} TEXTS=${TEXTS:-../shared/data}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/runs/inductor} TORCHINDUCTOR_COMPILE_THREADS=2
trap 'kill $!; wait $!; limit=0' TERM INT HUP       # what this call runs stops with it

piece() {       # NAME COMMAND...: runs it unless it is done, for the time that is left
    local name=$1 left=$((limit - SECONDS)) began=$SECONDS code; shift
    [[ $name =~ $only && ! -e $out/$name.ok && ! -e $out/$name.failed ]] || return
    [ $left -ge 20 ] || { echo "no time left before $name: call again"; exit 0; }
    timeout -k 15 $left bash -c 'trap "sleep 60" TERM; "$@"' . "$@" > "$out/$name.txt" 2>&1 &   # then all is killed
    wait $!; code=$?
    case $code in 0) touch "$out/$name.ok" ;; 12[49] | 13[07] | 143) ;; *) touch "$out/$name.failed" ;; esac
    [ $code -lt 124 ] || find "$TORCHINDUCTOR_CACHE_DIR" -name '*.so' -mmin -2 -delete    # stopped, maybe while linking
    echo "== $name: exit $code after $((SECONDS - began)) s
$(tail -n "${show:-3}" "$out/$name.txt" | cut -c 1-300)"
}

machine() {     # the GPU and the versions, and the texts
    nvidia-smi
    date -u; git log -1 --format=%h
    python3 -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)"
    for name in $LARGE $SMALL; do
        [ -e data/$name ] || case $name in
            stdlib) python3 data_prep.py stdlib ;;
            prose) python3 data_prep.py text "$TEXTS"/corpus30m/prose_train.txt.xz --name prose \
                --val "$TEXTS"/corpus30m/prose_val.txt.xz --tokenizer "$TEXTS"/corpus30m/prose.tiktoken & ;;
            wiki) python3 data_prep.py text "$TEXTS"/corpus/simplewiki_train.txt.xz --name wiki \
                --val "$TEXTS"/corpus/simplewiki_val.txt.xz --tokenizer "$TEXTS"/corpus/wiki.tiktoken & ;;
        esac
    done
    wait
}

shared() {      # COMMAND...: by several processes that share the GPU through NVIDIA's MPS, if there is one
    local code mps=$runs/mps
    mkdir -p "$mps"
    export CUDA_MPS_PIPE_DIRECTORY=$(realpath "$mps") CUDA_MPS_LOG_DIRECTORY=$(realpath "$mps")
    nvidia-cuda-mps-control -d || pgrep nvidia-cuda-mps > /dev/null || unset CUDA_MPS_PIPE_DIRECTORY
    "$@"; code=$?
    [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control
    return $code
}

rates() {       # which learning rates suit 30M parameters?
    shared python3 results/gpu/rates.py --data "$LARGE" --results "$runs/rates" --jobs ${RATES_JOBS:-13} \
        $small ${small:+--steps 20 --warmup_steps 5}
}

study() {       # NAME OPTIONS...: results/study/study.py with this name's results, at first those of the repository
    local results=$out/$1 name=$1
    shift
    mkdir -p "$results"
    [ -n "$small" ] || cp -n results/$name/runs.csv results/$name/logs.jsonl.xz "$results" 2> /dev/null
    shared python3 results/study/study.py --results "$results" --out "$runs/$name" --scales 1 --jobs "$jobs" \
        --ignore code torch "$@" $small             # stages are of many days: report.py overlooks these two as well
}

large() {       # the 30M study at the rates that were best for gpt; while there are none 124, as if stopped
    local factors; factors=$(cat "$runs/rates/factors") || return 124
    study study-30m --preset study-30m --data "$LARGE" --dtype auto --micro_batch 16 --factors $factors "$@"
}

first() {       # MODEL: five steps compiled on this device, and eager in fp32 on the CPU: the same losses?
    local a=$runs/first-$1 b=$runs/first-cpu-$1
    local flags="--model $1 --n_layer 4 $small --data $SMALL --max_steps 5 --warmup_steps 1 --eval_tokens 8192"
    rm -rf "$a" "$b"
    python3 train.py $flags --compile --out "$a" && python3 train.py $flags --device cpu --dtype fp32 --out "$b" &&
        python3 - "$a" "$b" <<'P'
import json, sys
a, b = ([x["loss"] for x in map(json.loads, open(f"{run}/log.jsonl")) if x["kind"] == "train"] for run in sys.argv[1:])
worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
print(f"losses {a[0]:.4f} to {a[-1]:.4f}; largest difference {worst:.3g}, allowed 0.07")   # bf16 alone: 0.059 (attnres)
sys.exit(worst > 0.07)
P
}
export -f machine shared rates study large first

ideas="gpt gpt-gated gpt-9x512 muddformer mhc hyperconnections attnres attnres_block denseformer resformer-half satformer
    exoformer exoformer_dynamic"
wide="gpt-gated muddformer mhc hyperconnections attnres denseformer satformer resformer-half exoformer"
gated="muddformer mhc attnres denseformer resformer-half satformer"
piece machine machine
piece rates rates
piece study-30m large --seeds 1 --steps $ends --systems $ideas
piece study env TORCHINDUCTOR_CUDAGRAPHS=1 bash -c 'study study --data "$SMALL" "$@"' . --steps $short \
    --systems $(printf '%s-8x160 ' $wide) $(printf '%s-gated ' $gated)
for model in $(cd models && ls [a-z]*.py); do piece first-${model%.py} first ${model%.py}; done
piece study-30m-seeds large --seeds 3 --steps $ends --systems gpt gpt-9x512 $ideas
[ -z "${NANOGPT:-}${FACTORY:-}$peers" ] || piece peers env -u TORCHINDUCTOR_COMPILE_THREADS python3 \
    results/bench/peers.py $peers --csv "$out/peers.csv" --minutes $(((limit - SECONDS) / 60)) \
    ${NANOGPT:+--nanogpt "$NANOGPT"} ${FACTORY:+--factory "$FACTORY"}
piece study-more env TORCHINDUCTOR_CUDAGRAPHS=1 bash -c 'study study --data "$SMALL" "$@"' . --steps $short --seeds 5 \
    --systems gpt gpt-wide-stream muddformer
echo "all pieces tried; results in $out"

#!/usr/bin/env bash
# The first hours of this repository on a GPU: what has been counted or computed gets measured, most valuable first.
#
#     bash results/gpu/day.sh                     everything that is not done yet
#     MINUTES=9 bash results/gpu/day.sh           stop after that time; the next call goes on
#     LAYERS=8 NEW_TOKENS=0 bash results/gpu/day.sh       bench.py with so many layers, without decoding: compiles in minutes
#     SIZE=tiny bash results/gpu/day.sh           the same in tiny shapes, on a CPU too: a test of this script
#
# Each piece writes OUT_DIR/NAME.txt (runs/day-out) and, when it ended well, OUT_DIR/NAME.ok, by which it is skipped
# later. Runs go to RUNS (runs/day) and are resumed. README.md beside this file says what the pieces are for.
set -u
cd "$(dirname "$0")/../.."
out=${OUT_DIR:-runs/day-out} runs=${RUNS:-runs/day} deadline=$((${MINUTES:-1000} * 60))
mkdir -p "$out" "$runs"
export PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True        # two models take turns in bench.py
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/runs/inductor}

full() { [ "${SIZE:-full}" != tiny ]; }

piece() {       # NAME COMMAND...: runs it, unless it is done, for at most the time that is left, which is `need` or more
    local name=$1 left=$((deadline - SECONDS)) began=$SECONDS code
    shift
    [ -e "$out/$name.ok" ] && return
    [ $left -ge ${need:-20} ] || { echo "no time left before $name: call again"; exit 0; }
    timeout -k 10 $left "$@" > "$out/$name.txt" 2>&1
    code=$?
    [ $code = 0 ] && touch "$out/$name.ok"
    echo "== $name: exit $code after $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-3}" "$out/$name.txt" | cut -c 1-300
}

losses() { python3 - "$@" <<'P'     # RUN...: whether their logs hold the same losses, and the last ones
import json, sys
logs = [[(r["step"], r["loss"]) for r in map(json.loads, open(f"{run}/log.jsonl")) if r["kind"] == "train"] for run in sys.argv[1:]]
print(*(f"{run}: {len(log)} steps, last loss {log[-1][1]!r}" for run, log in zip(sys.argv[1:], logs)), sep="\n")
print("bit for bit the same" if all(log == logs[0] for log in logs) else "NOT the same; largest difference "
      f"{max(abs(a[1] - b[1]) for log in logs for a, b in zip(log, logs[0]))}")
P
}

machine() { date -u; nvidia-smi || true; python3 -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)"; git log -1 --format=%h || true; }

killed() {      # FLAGS...: a run, the same run again, and one that is killed and resumed
    local a=$runs/whole b=$runs/again c=$runs/killed flags="--max_steps 60 --warmup_steps 10 --eval_every 30 --save_every 10 $*"
    rm -rf $a $b $c
    python3 train.py $flags --out $a && python3 train.py $flags --out $b || return 1
    python3 train.py $flags --out $c & local pid=$!
    until grep -qs '"step": 25' $c/log.jsonl || ! kill -0 $pid 2> /dev/null; do sleep 0.1; done
    kill -9 $pid; wait $pid
    python3 train.py --resume $c && losses $a $b $c
}

memory() {      # the out-of-memory message: one line, exit code 2
    rm -rf $runs/memory
    python3 train.py --micro_batch 32768 --batch_tokens 8388608 --max_steps 1 --out $runs/memory > $runs/memory.txt 2>&1
    [ $? = 2 ] && grep 'out of memory' $runs/memory.txt
}

first_steps() { # MODEL: five steps compiled on this device, and eager in fp32 on the CPU
    local common="--model $1 --n_layer 4 --max_steps 5 --warmup_steps 1 --eval_every 5 --eval_tokens 8192"
    rm -rf $runs/first-$1 $runs/first-cpu-$1
    python3 train.py $common --compile --out $runs/first-$1 \
        && python3 train.py $common --device cpu --dtype fp32 --out $runs/first-cpu-$1 \
        && losses $runs/first-$1 $runs/first-cpu-$1
}

bench() {       # PRESET BATCH MODEL...: one model beside gpt, in one piece each
    local preset=$1 shape="--batch $2 --rounds 5 --new_tokens ${NEW_TOKENS:-64} ${LAYERS:+--n_layer $LAYERS}" model need=240
    full || shape="--batch 2 --rounds 2 --new_tokens 4 --n_layer 4 --d_model 64 --n_head 2 --d_ff 128 --vocab_size 512 --seq_len 64"
    shift 2
    for model in "$@"; do
        piece "bench-$preset-${model//[:=]/-}" python3 bench.py --preset $preset --models $model --bytes $shape \
            --json "$out/bench-$preset-${model//[:=]/-}.json"
    done
}

study() {       # SEED MODEL...: 21M parameters, DATA (docs/data.md says what there is), one run per piece
    local seed=$1 model name run
    local flags="--preset study --d_model 384 --n_head 6 --seq_len 512 --max_len 512 --batch_tokens 65536 --max_steps ${STEPS:-920}"
    full || flags="--preset study --n_layer 2 --d_model 32 --n_head 2 --max_steps 4 --warmup_steps 1 --eval_tokens 1000"
    shift
    for model in "$@"; do
        name=study-${model// --/-}-seed$seed name=${name// /-} run=$runs/$name
        if [ -e $run/ckpt.pt ]; then piece $name python3 train.py --resume $run
        else
            rm -rf $run         # stopped before its first checkpoint
            piece $name python3 train.py --model $model --data "${DATA:-stdlib}" $flags --seed $seed --out $run
        fi
        mkdir -p "$out/$name" && cp $run/config.json $run/log.jsonl "$out/$name" 2> /dev/null
    done
}

export -f killed losses memory first_steps
export runs
models=$(cd models && ls [a-z]*.py | sed 's/\.py//')
small=""; full || small="--n_layer 2 --d_model 64 --n_head 2"

piece machine bash -c "$(declare -f machine); machine"
bench exo-450m 16 gpt:gate=elementwise exoformer muddformer satformer
piece resume bash -c "killed $small"
piece resume-deterministic bash -c "killed --deterministic $small"
bench exo-450m 16 resformer attnres_block
for model in gpt muddformer exoformer satformer attnres; do piece first-$model bash -c "first_steps $model"; done
full && piece memory bash -c memory
bench mudd-405m 16 muddformer attnres denseformer hyperconnections
full && piece tests python3 -m pytest -q -n 8 --dist loadfile
for seed in 0 1; do study $seed gpt "gpt --gate elementwise" resformer exoformer satformer muddformer attnres denseformer; done
bench exo-450m 16 exoformer_dynamic attnres speedrun cla kern muddmoe geonorm
bench exo-450m 2 sas dape sambay
for model in $models; do piece first-$model bash -c "first_steps $model"; done
full && piece decode python3 bench.py --preset exo-450m --models sambay --decode 1024 8192 32768 --json $out/decode.json
for model in muddformer attnres; do
    full && piece profile-$model python3 bench.py --preset exo-450m --models $model --batch 16 --profile $out/$model-trace.json
done
bench mudd-405m 16 mhc       # last: its Sinkhorn takes long to compile
echo "all pieces tried; results in $out"

"""The engine on a GPU, checked and measured in one run of less than eight minutes: `make gpu-check`.

    python -m benchmarks.gpu_check [--dry] [--out gpu_check.json] [--model FOLDER] [--parts NAME ...]

Needs torch, triton, transformers and what they need; no cluster, no network. Each part is a process with a
time limit of its own, and says what it finds line by line: one that crashes or hangs loses only the rest of
itself. `--dry` runs the same program on the CPU with tiny shapes, the kernels in Triton's interpreter.

    kernels   every kernel against its torch form, bfloat16 and float32
    llama     the shape of Llama-2-7B with random weights: tokens and logits of transformers, then the speed
    repeat    graphs against operators, one run against another, alone against in a batch: bit for bit
    ranks     two ranks against transformers, symmetric memory against NCCL; a rank that is killed, and one
              that is stopped, end their group in time
    mistral   tokens and logits of transformers for eight layers of Mistral-7B
    model     the same of a folder that is given
    flashinfer  where it is installed: prompts by it against torch, and beside Triton

Exit code 1: a check failed, or a part did not end. Targets of speed that are missed are told, and no failure.

Not covered: reads of KV blocks between two groups.
"""

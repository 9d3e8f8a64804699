"""Training of what guesses tokens for a model: Medusa heads and draft models, from the model's own text.

    prompts     chat prompts made from topics and instructions
    asking      and those that the model makes itself
    answers     to requests, by the engine of this project
    writing     the model's answers to the prompts: `text.jsonl`
    states      what the model computes along its answers: `states.safetensors`
    material    both, ready to train on; the draft vocabulary; what to learn at each place
    medusa      `python -m workers.training.medusa`: heads on the last hidden state
    draft       `python -m workers.training.draft`: a model of one or two layers
    acceptance  how many guesses a step of the engine would accept

Not covered: models whose final hidden states transformers does not give, and training on several machines.
"""

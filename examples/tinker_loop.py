"""A training loop of one's own with Tinker's SDK, against `treadle serve --tinker` on this machine.

    treadle sft arithmetic --out models/sums        # a model that answers a sum with some number
    treadle serve models/sums --tinker              # prints two environment variables; export both in another shell
    python examples/tinker_loop.py                  # in an environment with `pip install tinker`

Each step samples eight answers to each of 16 sums, rewards those of two digits, right or wrong, and reinforces what did
better than its siblings. All of the loop is here: the server keeps the weights, samples, and computes gradients.
"""

import random
import re
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

ANSWERS, SUMS = 8, 16
TWO_DIGITS = re.compile(r"<answer> \d\d</answer>")


def datum(prompt: list[int], answer: Any, advantage: float) -> Any:
    """Return one answer to learn: every position predicts the next token, and the prompt's have no advantage."""
    before = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": np.array([*prompt[1:], *answer.tokens], np.int64),
        "logprobs": np.array([*before, *answer.logprobs], np.float32),
        "advantages": np.array([*before, *[advantage] * len(answer.tokens)], np.float32),
    }
    return types.Datum(types.ModelInput.from_ints([*prompt, *answer.tokens[:-1]]), inputs)


def main(steps: int) -> None:
    """Train, printing the mean reward of each step."""
    service, draw = tinker.ServiceClient(), random.Random(0)
    base = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(base_model=base, rank=16, seed=0)
    tokenizer, params = client.get_tokenizer(), types.SamplingParams(max_tokens=8, temperature=1.0)
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client()
        sums = [f"What is {draw.randrange(10)} + {draw.randrange(10)}?" for _ in range(SUMS)]
        texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in sums]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        futures = [sampler.sample(types.ModelInput.from_ints(ids), ANSWERS, params) for ids in prompts]
        data, rewards = [], []
        for ids, future in zip(prompts, futures, strict=True):
            answers = future.result().sequences
            scores = [float(bool(TWO_DIGITS.match(tokenizer.decode(answer.tokens)))) for answer in answers]
            data += [datum(ids, each, s - sum(scores) / ANSWERS) for each, s in zip(answers, scores, strict=True)]
            rewards += scores
        gradients = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        print(f"step {step:2}: reward {np.mean(rewards):.2f}, loss {gradients.result().metrics['loss:sum']:.3f}")
    print("saved", client.save_state("trained").result().path)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)

"""What a client does with Tinker's SDK, from its first call to its last. Runs in the SDK's own environment.

python sdk_cycle.py TOKENIZER       where the server says that the tokenizer is
"""

import sys
from importlib.metadata import version

import numpy as np
import tinker
from tinker import types

PROMPT = [5, 6, 7, 8]


def datum(answer, names=("logprobs", "advantages")):
    before, count = [0.0] * (len(PROMPT) - 1), len(answer.tokens)
    inputs = {
        "target_tokens": np.array([*PROMPT[1:], *answer.tokens], np.int64),
        "logprobs": np.array([*before, *answer.logprobs], np.float32),
        "advantages": np.array([*before, *[1.0] * count], np.float32),
    }
    chosen = {name: inputs[name] for name in ("target_tokens", *names)}
    return types.Datum(model_input=types.ModelInput.from_ints([*PROMPT, *answer.tokens[:-1]]), loss_fn_inputs=chosen)


def logprobs(output):
    return [np.asarray(each["logprobs"].data) for each in output.loss_fn_outputs]


def main(tokenizer):
    service = tinker.ServiceClient()
    base = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
    info = client.get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == (base, tokenizer), info

    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    answers = sampler.sample(prompt=prompt, num_samples=4, sampling_params=params).result().sequences
    again = sampler.sample(prompt=prompt, num_samples=4, sampling_params=params).result().sequences
    assert [a.tokens for a in answers] == [a.tokens for a in again] and len(answers) == 4
    assert len(sampler.compute_logprobs(prompt).result()) == len(PROMPT)

    data = [datum(answer) for answer in answers]
    gradients = client.forward_backward(data, "importance_sampling")
    step = client.optim_step(types.AdamParams(learning_rate=1e-2))
    for answer, computed in zip(answers, logprobs(gradients.result()), strict=True):
        np.testing.assert_allclose(computed[len(PROMPT) - 1 :], answer.logprobs, atol=1e-5)  # trained as sampled
    assert step.result() is not None

    def least_squares(data, logprobs):
        loss = sum((each**2).sum() for each in logprobs)
        return loss, {"squares": float(loss)}

    try:
        import torch  # noqa: F401
    except ImportError:
        pass  # what a custom loss needs
    else:
        custom = client.forward_backward_custom([datum(a, ()) for a in answers], least_squares).result()
        assert custom.metrics["squares"] > 0
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    state, weights = client.save_state("one").result().path, client.save_weights_for_sampler("two").result().path
    trained = service.create_sampling_client(model_path=weights).compute_logprobs(prompt).result()
    assert not np.allclose(trained[1:], sampler.compute_logprobs(prompt).result()[1:], atol=1e-4)
    other = service.create_training_client_from_state_with_optimizer(state)
    here, there = (logprobs(each.forward(data, "importance_sampling").result()) for each in (client, other))
    np.testing.assert_allclose(np.concatenate(here), np.concatenate(there), atol=1e-6)

    rest = service.create_rest_client()
    assert {c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints} == {state, weights}
    rest.delete_checkpoint_from_tinker_path(weights).result()
    try:
        client.forward_backward(data, "nonsense").result()
    except tinker.TinkerError as error:
        assert "unknown loss 'nonsense'" in str(error), error
    else:
        raise AssertionError("an unknown loss must be refused")
    print("done with", version("tinker"))


main(sys.argv[1])

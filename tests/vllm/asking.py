"""What the tests ask of an engine in their own process."""

from vllm import SamplingParams


def greedy(tokens):
    """That many tokens, the likeliest ones, with their log-probabilities."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)


def run(engine, prompts, params):
    """The outputs of prompts that are given as token ids."""
    return engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens_of(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]

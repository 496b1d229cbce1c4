"""What an engine computes before the first request."""

from mmvllm.sampling_params import SamplingParams

# Together they take every path of the sampler, whose kernels are compiled when they are first used.
WARMUP_PARAMS = (
    SamplingParams(max_tokens=2, ignore_eos=True, seed=0),
    SamplingParams(
        max_tokens=2,
        ignore_eos=True,
        seed=0,
        min_tokens=1,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 0.1},
        no_repeat_ngram_size=2,
        logprobs=1,
    ),
)

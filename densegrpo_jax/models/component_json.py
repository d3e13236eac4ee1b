"""Reading a component's config.json into a frozen dataclass, refusing whatever the network does not implement."""

from collections.abc import Mapping, Set
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

# What transformers writes into every config.json: labels, text generation, bookkeeping. None of it changes an encoder's output.
TRANSFORMERS_KEYS = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _diffusers_version architectures
    attention_dropout bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dropout dropout_rate dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_factor initializer_range is_encoder_decoder label2id
    length_penalty logit_scale_init_value max_length min_length model_type n_positions no_repeat_ngram_size num_beam_groups
    num_beams num_decoder_layers num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache""".split()
)


def read_fields(cls: type, values: Mapping[str, Any], fixed: Mapping[str, Any], ignored: Set[str]) -> dict[str, Any]:
    """The fields of a config dataclass found in a component's config.json.

    Args:
      cls: the dataclass; its types are what the values are held to, its defaults those of the library that wrote the file.
      values: the parsed config.json.
      fixed: options that are not implemented, each with the one value that means its absence.
      ignored: keys that do not change the network's output.

    Returns:
      Arguments for `cls`; lists have become tuples.

    Raises:
      ValueError: a key that is neither a field, nor fixed, nor ignored; a fixed one of another value; a field of another type.
    """
    fields = get_type_hints(cls)
    for key, value in values.items():
        if key in fixed and value != fixed[key]:
            raise ValueError(f"{cls.__name__}: {key} = {value!r} is not supported, only {fixed[key]!r}")
        if key in fields and not _fits(value, fields[key]):
            raise ValueError(f"{cls.__name__}: {key} = {value!r} should be of type {getattr(fields[key], '__name__', fields[key])}")
        if key not in fields and key not in fixed and key not in ignored:
            raise ValueError(f"{cls.__name__}: unknown option {key} = {value!r}; this network does not implement it")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in fields}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a field's type: a plain type, a union of them, or a tuple of one."""
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, get_args(kind)[0]) for entry in value)
    return type(value) is kind or (kind is float and type(value) is int)

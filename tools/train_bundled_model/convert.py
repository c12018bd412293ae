"""Write the trained model as a quantised GGUF.

python -m tools.train_bundled_model.convert --work DIR --out FILE
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from ggml import ggml
from gguf import GGMLQuantizationType as QuantType
from tokenizers import Tokenizer

from .chat import CHAT_TEMPLATE
from .model import BundledModel, Config, named_tensors
from .tokenizer import END_OF_TEXT, IM_END, export_vocabulary, token_id

ARCHITECTURE = "qwen35moe"
NAME = "Baker Street 16M"
DESCRIPTION = (
    "A tiny Qwen3.5-style mixture of experts, trained from nothing on four adventures of Sherlock Holmes "
    "for swarmnode's demo and tests. It knows these stories and very little else."
)
SOURCE = (
    "The Adventures of Sherlock Holmes (1892) by Arthur Conan Doyle, public domain; "
    "trained by swarmnode's tools/train_bundled_model"
)

#: Quantisation by the end of the tensor's name; the others (norms, router, convolution, ...) stay F32.
QUANTISATION: dict[str, QuantType] = {
    "ffn_gate_exps.weight": QuantType.Q4_K,
    "ffn_up_exps.weight": QuantType.Q4_K,
    "ffn_down_exps.weight": QuantType.Q6_K,
    "ffn_gate_shexp.weight": QuantType.Q4_K,
    "ffn_up_shexp.weight": QuantType.Q4_K,
    "ffn_down_shexp.weight": QuantType.Q6_K,
    "attn_qkv.weight": QuantType.Q6_K,
    "attn_gate.weight": QuantType.Q4_K,
    "ssm_out.weight": QuantType.Q6_K,
    "ssm_alpha.weight": QuantType.Q8_0,
    "ssm_beta.weight": QuantType.Q8_0,
    "attn_q.weight": QuantType.Q4_K,
    "attn_k.weight": QuantType.Q6_K,
    "attn_v.weight": QuantType.Q6_K,
    "attn_output.weight": QuantType.Q6_K,
    "token_embd.weight": QuantType.Q4_K,
    "output.weight": QuantType.Q6_K,
}


def quant_type(name: str) -> QuantType:
    """The type a tensor is stored in."""
    leaf = name.rsplit(".", 2)[-2] + ".weight" if name.startswith("blk.") else name
    return QUANTISATION.get(leaf, QuantType.F32)


def quantise(values: npt.NDArray[np.float32], kind: QuantType) -> npt.NDArray[np.uint8]:
    """Quantise the rows of `values` [..., columns] with ggml; the result has bytes in the last dimension.

    gguf-py has no K-quants, which is why ggml does this. No importance matrix is used.
    """
    columns = values.shape[-1]
    rows = values.size // columns
    row_bytes = ggml.ggml_row_size(int(kind), columns)
    out = np.empty((*values.shape[:-1], row_bytes), np.uint8)
    written = ggml.ggml_quantize_chunk(
        int(kind),
        values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        out.ctypes.data_as(ctypes.c_void_p),
        0,
        rows,
        columns,
        None,
    )
    if written != out.nbytes:
        raise ValueError(f"ggml wrote {written} bytes instead of {out.nbytes}")
    return out


def add_architecture(writer: gguf.GGUFWriter, c: Config) -> None:
    """The sizes, under the keys that llama.cpp reads for this architecture."""
    writer.add_block_count(c.n_layer)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.n_embd)
    writer.add_head_count(c.head_count)
    writer.add_head_count_kv(c.head_count_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_rope_dimension_count(c.rope_dim)
    writer.add_rope_dimension_sections(list(c.rope_sections))
    writer.add_expert_count(c.expert_count)
    writer.add_expert_used_count(c.expert_used_count)
    writer.add_expert_feed_forward_length(c.expert_feed_forward_length)
    writer.add_expert_shared_feed_forward_length(c.expert_shared_feed_forward_length)
    writer.add_ssm_conv_kernel(c.ssm_conv_kernel)
    writer.add_ssm_state_size(c.ssm_state_size)
    writer.add_ssm_group_count(c.ssm_group_count)
    writer.add_ssm_time_step_rank(c.ssm_time_step_rank)
    writer.add_ssm_inner_size(c.ssm_inner_size)
    writer.add_full_attention_interval(c.full_attention_interval)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Vocabulary, merges, special ids and the chat template."""
    vocabulary = export_vocabulary(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(token_id(tokenizer, IM_END))
    writer.add_pad_token_id(token_id(tokenizer, END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(model: BundledModel, tokenizer: Tokenizer, path: Path) -> None:
    """Write the whole file."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("apache-2.0")
    writer.add_string("general.source", SOURCE)
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_architecture(writer, model.config)
    add_tokenizer(writer, tokenizer)
    for name, tensor in named_tensors(model).items():
        values = np.ascontiguousarray(tensor.float().numpy())
        kind = quant_type(name)
        if kind == QuantType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantise(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_checkpoint(work: Path) -> tuple[BundledModel, Tokenizer]:
    """The model and tokenizer that train.py left in `work`."""
    model = BundledModel(Config())
    model.load_state_dict(torch.load(work / "model.pt", weights_only=True))
    return model.eval(), Tokenizer.from_file(str(work / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train.py wrote to")
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    options = parser.parse_args()
    model, tokenizer = load_checkpoint(options.work)
    write_gguf(model, tokenizer, options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

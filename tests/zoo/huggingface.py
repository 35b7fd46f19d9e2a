"""Models of transformers, tiny ones: of many types, with and without dropout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo.registry import Draw, Family, coins, floats, uniform, whole

zoo = Family("transformers", "transformers")

TOKENS, CLASSES, WIDTH, STEPS = 24, 4, 16, 8

# -- sizes

_DECODER = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_GPT = {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 32, "use_cache": False}
_ENCODER = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": CLASSES,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": TOKENS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
_T5 = {
    "vocab_size": TOKENS, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_VISION = {
    "image_size": 16, "patch_size": 8, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_labels": CLASSES,
}  # fmt: skip
_SPEECH = {
    **{key: _ENCODER[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "vocab_size": 12, "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 8, "num_labels": CLASSES,
    "pad_token_id": 0, "apply_spec_augment": False, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_NO_DROPS = {
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
    "activation_dropout": 0.0, "dropout_rate": 0.0, "drop_path_rate": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "hidden_dropout": 0.0, "classifier_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip

# -- inputs, by word


def _words(low: int = 3, steps: int = STEPS) -> Draw:
    return whole(4, steps, low=low, high=TOKENS)


def _next(numbers: torch.Generator) -> Any:
    labels = torch.randint(3, TOKENS, (4, STEPS), generator=numbers)
    return torch.where(torch.rand(labels.shape, generator=numbers) < 0.2, -100, labels)


def _padded(_: torch.Generator) -> Any:
    return (torch.arange(STEPS) < torch.tensor([8, 6, 5, 7])[:, None]).long()


def _padded_left(numbers: torch.Generator) -> Any:
    return _padded(numbers).flip(1)


_INPUTS: Mapping[str, Mapping[str, Draw]] = {
    "tokens": {"input_ids": _words()},
    "next": {"labels": _next},
    "padded": {"attention_mask": _padded},
    "left": {"attention_mask": _padded_left},
    "targets": {"labels": _words(steps=6)},
    "class": {"labels": whole(4, high=CLASSES)},
    "classes": {"labels": coins(4, CLASSES)},
    "number": {"labels": floats(4)},
    "tags": {"labels": whole(4, STEPS, high=CLASSES)},
    "span": {"start_positions": whole(4, high=STEPS), "end_positions": whole(4, high=STEPS)},
    "choices": {"input_ids": whole(4, 3, STEPS, low=3, high=TOKENS), "labels": whole(4, high=3)},
    "image": {"pixel_values": floats(4, 3, 16, 16)},
    "large": {"pixel_values": floats(4, 3, 32, 32)},
    "larger": {"pixel_values": floats(4, 3, 96, 96)},
    "map": {"labels": whole(4, 32, 32, high=CLASSES)},
    "hidden": {"bool_masked_pos": lambda _: torch.tensor([[0, 1, 1, 0]] * 4).bool()},
    "depth": {"labels": uniform(4, 32, 32, low=0.5, high=2.0)},
    "speech": {"input_features": floats(4, 8, 32), "labels": _words(steps=6)},
    "waves": {"input_values": floats(4, 200)},
    "ctc": {"labels": whole(4, 5, low=1, high=12)},
    "boxes": {"bbox": lambda _: torch.arange(4 * STEPS * 4).view(4, STEPS, 4) % 4 + torch.tensor([0, 0, 8, 8])},
    "pair": {"pixel_values": floats(4, 3, 16, 16), "input_ids": _words(), "return_loss": lambda _: True},
    "series": {"past_values": floats(4, 16, 2), "future_values": floats(4, 4, 2)},
    "spectrogram": {"input_values": floats(4, 32, 16)},
    "permutation": {
        "perm_mask": lambda _: torch.triu(torch.ones(STEPS, STEPS)).expand(4, -1, -1).double(),
        "target_mapping": lambda _: torch.eye(STEPS).expand(4, -1, -1).double(),
        "labels": _words(),
    },
    "types": {"token_type_ids": whole(4, STEPS, high=2)},
    "order": {"next_sentence_label": whole(4, high=2)},
    "signs": {"labels": whole(4, STEPS, high=2)},
    "sounds": {"input_features": floats(4, 32, 8), "labels": _words(steps=6)},
}


def _add(name: str, model: str, kinds: str, sizes: Mapping[str, Any], *, drops: bool = False) -> None:
    """Add a model type, without dropout, or with what its configuration has; kinds: of its inputs."""

    def make() -> nn.Module:
        import transformers

        maker = getattr(transformers, model)
        config = maker.config_class(**sizes)
        for part in (config, *(getattr(config, key, None) for key in ("text_config", "vision_config", "encoder"))):
            if part is not None and not drops:
                for key, value in _NO_DROPS.items():
                    if isinstance(getattr(part, key, None), float):
                        setattr(part, key, value)
        module: nn.Module = maker(config)
        if not drops:
            for each in module.modules():
                if isinstance(each, nn.Dropout):
                    each.p = 0.0
        return module

    inputs = {key: draw for kind in kinds.split() for key, draw in _INPUTS[kind].items()}
    zoo.add(f"{name} with dropout" if drops else name, make, is_random=drops or name in _RANDOM, **inputs)


_Sizes = Mapping[str, Any]
_MODELS: tuple[tuple[str, str, str, _Sizes], ...] = (
    # Decoders.
    ("gpt2", "GPT2LMHeadModel", "tokens next", _GPT),
    ("gpt2, padded on the left", "GPT2LMHeadModel", "tokens next left", _GPT),
    ("gpt2 of classes", "GPT2ForSequenceClassification", "tokens class", {**_GPT, "num_labels": CLASSES,
        "pad_token_id": 0}),
    ("gptj", "GPTJForCausalLM", "tokens next", {**_GPT, "rotary_dim": 4}),
    ("gpt-neo", "GPTNeoForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "window_size": 4,
        "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]], "use_cache": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    ("gpt-neox", "GPTNeoXForCausalLM", "tokens next padded", _DECODER),
    ("gpt-bigcode", "GPTBigCodeForCausalLM", "tokens next", _GPT),
    ("codegen", "CodeGenForCausalLM", "tokens next", {**_GPT, "rotary_dim": 4}),
    ("llama, padded on the left", "LlamaForCausalLM", "tokens next left", _DECODER),
    ("llama of classes", "LlamaForSequenceClassification", "tokens class", {**_DECODER, "num_labels": CLASSES}),
    ("llama of tags", "LlamaForTokenClassification", "tokens tags", {**_DECODER, "num_labels": CLASSES}),
    ("mistral with a window", "MistralForCausalLM", "tokens next", {**_DECODER, "sliding_window": 4}),
    ("qwen2", "Qwen2ForCausalLM", "tokens next padded", _DECODER),
    ("qwen3", "Qwen3ForCausalLM", "tokens next", {**_DECODER, "head_dim": 8}),
    ("qwen3-moe", "Qwen3MoeForCausalLM", "tokens next", {
        **_DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }),
    ("gemma", "GemmaForCausalLM", "tokens next", {**_DECODER, "head_dim": 8}),
    ("gemma2", "Gemma2ForCausalLM", "tokens next", {**_DECODER, "num_hidden_layers": 2, "head_dim": 8,
        "sliding_window": 4}),
    ("gemma3", "Gemma3ForCausalLM", "tokens next", {**_DECODER, "head_dim": 8, "sliding_window": 4}),
    ("phi", "PhiForCausalLM", "tokens next", _DECODER),
    ("phi3", "Phi3ForCausalLM", "tokens next", _DECODER),
    ("phimoe", "PhimoeForCausalLM", "tokens next", {**_DECODER, "num_local_experts": 4}),
    ("olmo", "OlmoForCausalLM", "tokens next", _DECODER),
    ("olmo2", "Olmo2ForCausalLM", "tokens next", _DECODER),
    ("olmoe", "OlmoeForCausalLM", "tokens next", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2}),
    ("falcon", "FalconForCausalLM", "tokens next", {**_DECODER, "new_decoder_architecture": False}),
    ("falcon with alibi", "FalconForCausalLM", "tokens next", {**_DECODER, "alibi": True, "multi_query": False}),
    ("opt", "OPTForCausalLM", "tokens next", {**_DECODER, "ffn_dim": 32, "word_embed_proj_dim": WIDTH}),
    ("bloom", "BloomForCausalLM", "tokens next padded", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "n_layer": 1, "n_head": 4, "use_cache": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    ("mpt", "MptForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "d_model": WIDTH, "n_layers": 1, "n_heads": 4, "max_seq_len": 32, "use_cache": False,
    }),
    ("stablelm", "StableLmForCausalLM", "tokens next", _DECODER),
    ("starcoder2", "Starcoder2ForCausalLM", "tokens next", _DECODER),
    ("cohere", "CohereForCausalLM", "tokens next", _DECODER),
    ("granite", "GraniteForCausalLM", "tokens next", {**_DECODER, "logits_scaling": 2.0}),
    ("granite-moe", "GraniteMoeForCausalLM", "tokens next", {**_DECODER, "num_local_experts": 4,
        "num_experts_per_tok": 2}),
    ("nemotron", "NemotronForCausalLM", "tokens next", _DECODER),
    ("persimmon", "PersimmonForCausalLM", "tokens next", _DECODER),
    ("glm", "GlmForCausalLM", "tokens next", {**_DECODER, "head_dim": 8}),
    ("helium", "HeliumForCausalLM", "tokens next", {**_DECODER, "head_dim": 4}),
    ("smollm3", "SmolLM3ForCausalLM", "tokens next", _DECODER),
    ("exaone4", "Exaone4ForCausalLM", "tokens next", {**_DECODER, "sliding_window": 4}),
    ("deepseek-v3", "DeepseekV3ForCausalLM", "tokens next", {
        **_DECODER, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "num_hidden_layers": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    }),
    ("gpt-oss", "GptOssForCausalLM", "tokens next", {
        **_DECODER, "num_hidden_layers": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4,
    }),
    ("mamba", "MambaForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4, "use_cache": False,
    }),
    ("mamba2", "Mamba2ForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4,
        "head_dim": 8, "n_groups": 1, "chunk_size": 4, "use_cache": False,
    }),
    ("rwkv", "RwkvForCausalLM", "tokens next", {
        "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 32, "use_cache": False,
    }),
    ("openai-gpt", "OpenAIGPTLMHeadModel", "tokens next", {
        "vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 32,
    }),
    ("ctrl", "CTRLLMHeadModel", "tokens next", {
        "vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": 1, "n_head": 4, "dff": 32, "n_positions": 32,
        "use_cache": False,
    }),
    # Encoders.
    ("bert for pretraining", "BertForPreTraining", "tokens types next order", _ENCODER),
    ("bert of classes, padded", "BertForSequenceClassification", "tokens padded class", _ENCODER),
    ("bert of several classes", "BertForSequenceClassification", "tokens classes", {
        **_ENCODER, "problem_type": "multi_label_classification",
    }),
    ("bert of a number", "BertForSequenceClassification", "tokens number", {**_ENCODER, "num_labels": 1}),
    ("bert of tags", "BertForTokenClassification", "tokens tags", _ENCODER),
    ("bert of answers", "BertForQuestionAnswering", "tokens span", {**_ENCODER, "num_labels": 2}),
    ("bert of choices", "BertForMultipleChoice", "choices", _ENCODER),
    ("roberta", "RobertaForMaskedLM", "tokens next padded", _ENCODER),
    ("camembert of answers", "CamembertForQuestionAnswering", "tokens span", {**_ENCODER, "num_labels": 2}),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "tokens next", _ENCODER),
    ("albert", "AlbertForMaskedLM", "tokens next", {**_ENCODER, "embedding_size": 8}),
    ("electra", "ElectraForPreTraining", "tokens signs", {**_ENCODER, "embedding_size": 8}),
    ("distilbert", "DistilBertForMaskedLM", "tokens next padded", {
        "vocab_size": TOKENS, "dim": WIDTH, "hidden_dim": 32, "n_layers": 1, "n_heads": 4,
        "max_position_embeddings": 32,
    }),
    ("deberta", "DebertaForMaskedLM", "tokens next", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
    }),
    ("deberta-v2", "DebertaV2ForSequenceClassification", "tokens class", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
    }),
    ("mpnet", "MPNetForMaskedLM", "tokens next", _ENCODER),
    ("mobilebert", "MobileBertForMaskedLM", "tokens next", {
        **_ENCODER, "embedding_size": 8, "intra_bottleneck_size": 16, "true_hidden_size": 16,
        "num_feedforward_networks": 2,
    }),
    ("squeezebert", "SqueezeBertForMaskedLM", "tokens next", {
        **_ENCODER, "embedding_size": WIDTH, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1,
        "intermediate_groups": 2, "output_groups": 2,
    }),
    ("convbert", "ConvBertForMaskedLM", "tokens next", {**_ENCODER, "embedding_size": WIDTH, "conv_kernel_size": 3}),
    ("fnet", "FNetForMaskedLM", "tokens next", _ENCODER),
    ("roformer", "RoFormerForMaskedLM", "tokens next", {**_ENCODER, "embedding_size": WIDTH}),
    ("megatron-bert", "MegatronBertForMaskedLM", "tokens next", _ENCODER),
    ("rembert", "RemBertForMaskedLM", "tokens next", {
        **_ENCODER, "input_embedding_size": 8, "output_embedding_size": 8,
    }),
    ("ernie", "ErnieForMaskedLM", "tokens next", _ENCODER),
    ("ibert", "IBertForMaskedLM", "tokens next", _ENCODER),
    ("esm", "EsmForMaskedLM", "tokens next", {**_ENCODER, "mask_token_id": 23, "position_embedding_type": "rotary"}),
    ("modernbert", "ModernBertForMaskedLM", "tokens next", {
        **_ENCODER, "num_hidden_layers": 2, "local_attention": 4, "global_attn_every_n_layers": 2,
        "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    }),
    ("nystromformer", "NystromformerForMaskedLM", "tokens next", {
        **_ENCODER, "num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 3,
    }),
    ("canine", "CanineForSequenceClassification", "tokens class", {
        **_ENCODER, "num_hash_buckets": 32, "local_transformer_stride": 4, "downsampling_rate": 2,
        "upsampling_kernel_size": 2,
    }),
    ("xlnet", "XLNetLMHeadModel", "tokens permutation", {
        "vocab_size": TOKENS, "d_model": WIDTH, "n_layer": 1, "n_head": 4, "d_inner": 32, "dropout": 0.0,
    }),
    ("xlm", "XLMWithLMHeadModel", "tokens next", {
        "vocab_size": TOKENS, "emb_dim": WIDTH, "n_layers": 1, "n_heads": 4, "max_position_embeddings": 32,
        "pad_index": 0,
    }),
    ("layoutlm", "LayoutLMForTokenClassification", "tokens tags boxes", {**_ENCODER, "max_2d_position_embeddings": 16}),
    ("funnel", "FunnelForMaskedLM", "tokens next", {
        "vocab_size": TOKENS, "d_model": WIDTH, "n_head": 4, "d_head": 4, "d_inner": 32, "block_sizes": [1, 1],
        "num_decoder_layers": 1,
    }),
    ("longformer", "LongformerForMaskedLM", "tokens next", {**_ENCODER, "attention_window": [4]}),
    ("big-bird", "BigBirdForMaskedLM", "tokens next", {**_ENCODER, "attention_type": "original_full"}),
    ("splinter", "SplinterForQuestionAnswering", "tokens span", _ENCODER),
    # Encoders with decoders.
    ("t5", "T5ForConditionalGeneration", "tokens targets", _T5),
    ("t5, gated", "T5ForConditionalGeneration", "tokens padded targets", {**_T5, "feed_forward_proj": "gated-gelu"}),
    ("mt5", "MT5ForConditionalGeneration", "tokens targets", _T5),
    ("umt5", "UMT5ForConditionalGeneration", "tokens targets", _T5),
    ("switch", "SwitchTransformersForConditionalGeneration", "tokens targets", {
        **_T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    }),
    ("bart", "BartForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    ("mbart", "MBartForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    ("marian", "MarianMTModel", "tokens padded targets", _SEQ2SEQ),
    ("pegasus", "PegasusForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    ("blenderbot", "BlenderbotForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    ("m2m100", "M2M100ForConditionalGeneration", "tokens targets", _SEQ2SEQ),
    ("led", "LEDForConditionalGeneration", "tokens targets", {
        **_SEQ2SEQ, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32,
    }),
    # Speech.
    ("whisper", "WhisperForConditionalGeneration", "speech", {
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
    }),
    ("speech-to-text", "Speech2TextForConditionalGeneration", "sounds", {
        **_SEQ2SEQ, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "max_source_positions": 32,
        "max_target_positions": 16,
    }),
    ("wav2vec2 of classes", "Wav2Vec2ForSequenceClassification", "waves class", _SPEECH),
    ("wav2vec2 by CTC", "Wav2Vec2ForCTC", "waves ctc", _SPEECH),
    ("hubert", "HubertForSequenceClassification", "waves class", _SPEECH),
    ("wavlm", "WavLMForSequenceClassification", "waves class", {**_SPEECH, "num_buckets": 8,
        "max_bucket_distance": 16}),
    ("sew", "SEWForSequenceClassification", "waves class", {**_SPEECH, "squeeze_factor": 2}),
    ("audio spectrogram", "ASTForAudioClassification", "spectrogram class", {
        **{k: v for k, v in _VISION.items() if k != "image_size"}, "max_length": 32, "num_mel_bins": 16,
        "frequency_stride": 8, "time_stride": 8,
    }),
    # Images.
    ("vit", "ViTForImageClassification", "image class", _VISION),
    ("vit, masked", "ViTForMaskedImageModeling", "image hidden", {**_VISION, "encoder_stride": 8}),
    ("deit", "DeiTForImageClassification", "image class", _VISION),
    ("beit", "BeitForImageClassification", "image class", {**_VISION, "use_relative_position_bias": True}),
    ("dinov2", "Dinov2ForImageClassification", "image class", {**_VISION, "mlp_ratio": 2}),
    ("siglip", "SiglipForImageClassification", "image class", {
        "vision_config": {k: v for k, v in _VISION.items() if k != "num_labels"}, "num_labels": CLASSES,
    }),
    ("swin", "SwinForImageClassification", "large class", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": CLASSES,
    }),
    ("swinv2", "Swinv2ForImageClassification", "large class", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": CLASSES,
    }),
    ("convnext", "ConvNextForImageClassification", "large class", {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES,
    }),
    ("convnextv2", "ConvNextV2ForImageClassification", "large class", {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES,
    }),
    ("resnet", "ResNetForImageClassification", "large class", {
        "num_labels": CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic",
    }),
    ("regnet", "RegNetForImageClassification", "large class", {
        "num_labels": CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4,
    }),
    ("mobilenet-v1", "MobileNetV1ForImageClassification", "larger class", {"depth_multiplier": 0.25,
        "num_labels": CLASSES}),
    ("levit", "LevitForImageClassification", "large class", {
        "image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
        "key_dim": [4, 4, 4], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2], "num_labels": CLASSES,
    }),
    ("poolformer", "PoolFormerForImageClassification", "large class", {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES,
    }),
    ("pvt", "PvtForImageClassification", "large class", {
        "image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
        "mlp_ratios": [2, 2, 2, 2], "sequence_reduction_ratios": [2, 2, 1, 1], "patch_sizes": [4, 2, 2, 1],
        "strides": [4, 2, 2, 1], "num_labels": CLASSES,
    }),
    ("segformer", "SegformerForSemanticSegmentation", "large map", {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "num_labels": CLASSES,
        "num_attention_heads": [1, 1, 2, 2],
    }),
    ("mobilevit", "MobileViTForImageClassification", "large class", {
        "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 32,
        "num_labels": CLASSES,
    }),
    ("focalnet", "FocalNetForImageClassification", "large class", {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16],
        "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": CLASSES,
    }),
    ("vit-mae", "ViTMAEForPreTraining", "image", {
        **_VISION, "decoder_hidden_size": 16, "decoder_intermediate_size": 32, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
    }),
    ("glpn", "GLPNForDepthEstimation", "large depth", {
        "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8,
        "num_attention_heads": [1, 1, 2, 2],
    }),
    # Several kinds of data, series.
    ("clip", "CLIPModel", "pair", {
        "text_config": {**_ENCODER, "eos_token_id": 2, "bos_token_id": 1, "projection_dim": 8},
        "vision_config": {k: v for k, v in {**_VISION, "projection_dim": 8}.items() if k != "num_labels"},
        "projection_dim": 8,
    }),
    ("patchtst", "PatchTSTForPrediction", "series", {
        "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
        "d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16,
    }),
    ("patchtsmixer", "PatchTSMixerForPrediction", "series", {
        "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
        "d_model": 8, "num_layers": 1,
    }),
)  # fmt: skip

_RANDOM = ("vit-mae", "phimoe")
"""Draw random numbers without dropout, too."""

_DROPPING = (
    "gpt2", "llama, padded on the left", "bert of classes, padded", "t5", "bart", "vit", "swin", "wav2vec2 of classes",
    "albert", "opt",
)  # fmt: skip
"""Trained with the dropout of their configurations, too."""


for _name, _model, _kinds, _sizes in _MODELS:
    _add(_name, _model, _kinds, _sizes)
    if _name in _DROPPING:
        _add(_name, _model, _kinds, _sizes, drops=True)

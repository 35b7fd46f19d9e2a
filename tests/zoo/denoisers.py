"""Models of diffusers, tiny ones: what predicts noise or a velocity, and autoencoders of images."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Draw, Family, floats, uniform, whole

zoo = Family("diffusers", "diffusers")


class Denoiser(nn.Module):
    """The squares of what is left of the noise."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, noise: Any, **inputs: Any) -> Any:
        return functional.mse_loss(self.net(**inputs, return_dict=False)[0], noise)


def _add(name: str, model: str, sizes: Mapping[str, Any], *, is_random: bool = False, **inputs: Draw) -> None:
    def make() -> nn.Module:
        import diffusers

        net: nn.Module = getattr(diffusers, model)(**sizes)
        torch.manual_seed(0)
        with torch.no_grad():
            # Layers that begin as zeros would leave gradients of others out.
            for parameter in net.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return Denoiser(net)

    zoo.add(name, make, is_random=is_random, **inputs)


def _images(channels: int, size: int = 8) -> Callable[[torch.Generator], Any]:
    return floats(2, channels, size, size)


_UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_STEPS = whole(2, high=100)
_TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}

_add("unet", "UNet2DModel", {
    **_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
}, sample=_images(3), timestep=_STEPS, noise=_images(3))  # fmt: skip
_add("unet of texts", "UNet2DConditionModel", {
    **_UNET, "cross_attention_dim": 8, "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock2D",
    "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}, sample=_images(4), timestep=_STEPS, encoder_hidden_states=floats(2, 6, 8), noise=_images(4))  # fmt: skip
_add("unet of videos", "UNet3DConditionModel", {
    **_UNET, "cross_attention_dim": 8, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}, sample=floats(2, 4, 2, 8, 8), timestep=_STEPS, encoder_hidden_states=floats(2, 6, 8),
    noise=floats(2, 4, 2, 8, 8), is_random=True)  # fmt: skip
_add("DiT", "DiTTransformer2DModel", {
    **_TRANSFORMER, "in_channels": 4, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
    "norm_num_groups": 4,
}, hidden_states=_images(4), timestep=_STEPS, class_labels=whole(2, high=10), noise=_images(4),
    is_random=True)  # fmt: skip
_add("PixArt", "PixArtTransformer2DModel", {
    **_TRANSFORMER, "in_channels": 4, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 16,
    "caption_channels": 8, "norm_num_groups": 4, "use_additional_conditions": False,
}, hidden_states=_images(4), timestep=_STEPS, encoder_hidden_states=floats(2, 6, 8), noise=_images(8))  # fmt: skip
_add("Stable Diffusion 3", "SD3Transformer2DModel", {
    **_TRANSFORMER, "sample_size": 8, "patch_size": 2, "in_channels": 4, "joint_attention_dim": 8,
    "caption_projection_dim": 16, "pooled_projection_dim": 8, "out_channels": 4, "pos_embed_max_size": 8,
}, hidden_states=_images(4), timestep=_STEPS, encoder_hidden_states=floats(2, 6, 8), pooled_projections=floats(2, 8),
    noise=_images(4))  # fmt: skip
_add("Flux", "FluxTransformer2DModel", {
    **_TRANSFORMER, "num_single_layers": 1, "in_channels": 4, "joint_attention_dim": 8, "pooled_projection_dim": 8,
    "axes_dims_rope": (2, 2, 4), "patch_size": 1,
}, hidden_states=floats(2, 16, 4), timestep=uniform(2), encoder_hidden_states=floats(2, 6, 8),
    pooled_projections=floats(2, 8), img_ids=floats(16, 3), txt_ids=floats(6, 3), noise=floats(2, 16, 4))  # fmt: skip
_add("Sana", "SanaTransformer2DModel", {
    **_TRANSFORMER, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8, "patch_size": 1,
}, hidden_states=_images(4), timestep=_STEPS, encoder_hidden_states=floats(2, 6, 8), noise=_images(4))  # fmt: skip
_add("prior", "PriorTransformer", {
    **_TRANSFORMER, "embedding_dim": 8, "num_embeddings": 6, "additional_embeddings": 4,
}, hidden_states=floats(2, 8), timestep=_STEPS, proj_embedding=floats(2, 8), encoder_hidden_states=floats(2, 6, 8),
    noise=floats(2, 8))  # fmt: skip
_add("autoencoder", "AutoencoderKL", {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 4,
}, sample=_images(3), noise=_images(3))  # fmt: skip
_add("autoencoder of codes", "VQModel", {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "num_vq_embeddings": 12, "norm_num_groups": 4,
}, sample=_images(3), noise=_images(3))  # fmt: skip

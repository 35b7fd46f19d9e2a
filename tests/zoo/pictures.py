"""Models of timm, cut to few layers and channels where they can be."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, floats, whole

zoo = Family("timm", "timm")

CLASSES = 4


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any, labels: Any) -> Any:
        return functional.cross_entropy(self.net(x), labels)


def _add(name: str, size: int = 64, *, is_random: bool = False, **options: Any) -> None:
    def make() -> nn.Module:
        import timm

        net = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in net.parameters():
                # Scales that begin as zeros would leave gradients of others out.
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return Classifier(net)

    zoo.add(name, make, is_random=is_random, x=floats(4, 3, size, size), labels=whole(4, high=CLASSES))


_VIT = {"img_size": 64, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
_PLAIN = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}

for _name in ("resnet18", "resnet26d", "seresnet18", "ecaresnet26t", "skresnet18"):
    _add(_name)
for _name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224"):
    _add(_name, **_VIT)
# Its positions go through a dropout.
for _name in ("vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224"):
    _add(_name, is_random=True, **_VIT)
_add("cait_xxs24_224", **_VIT)
_add("xcit_nano_12_p8_224", img_size=64, depth=1)
_add("beit_base_patch16_224", **_VIT)
# Its second block is left out at times.
_add(
    "swin_tiny_patch4_window7_224",
    is_random=True,
    img_size=64,
    window_size=4,
    depths=(1, 1),
    num_heads=(1, 2),
    embed_dim=8,
    patch_size=2,
)
_add("swinv2_tiny_window8_256", img_size=64, window_size=4, depths=(1, 1), num_heads=(1, 2), embed_dim=8, patch_size=2)
_add("convnext_atto", **_PLAIN)
_add("convnextv2_atto", **_PLAIN)
_add("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), heads=(2, 2, 2, 2))
_add("mobilenetv3_small_050")
_add("mobilenetv2_050")
_add("efficientnet_lite0")
_add("regnetx_002")
_add("regnety_002")
_add("ghostnet_050", is_random=True)  # a dropout before its head
_add("densenet121", block_config=(1, 1, 1, 1), growth_rate=4)
_add("dla34")
_add("res2net50_26w_4s")
_add("hrnet_w18_small")
_add("mobilevit_xxs")
_add("coat_tiny", img_size=64)
_add("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2))
_add("twins_svt_small", img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32))
_add("maxvit_pico_rw_256", img_size=64)
_add("nf_resnet26")
_add("resnetv2_50", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_chs=8)
_add("selecsls42b")
_add("inception_next_atto", depths=(1, 1, 1, 1))
_add("fastvit_t8")
_add("starnet_s1", depths=(1, 1, 1, 1))

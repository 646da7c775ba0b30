"""Run with pytest. The fixture `check_defense` comes with patchguard."""

from mean_confidence import MeanConfidence


def test_no_content_of_any_window_breaks_a_proof(check_defense):
    """Small grids, every window, every content."""
    assert check_defense(MeanConfidence()) > 100_000

"""Environments of skyrl_gym, SkyRL's library, as environments of Treadle."""

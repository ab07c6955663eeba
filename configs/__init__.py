"""Configs: get_config(loss) → ConfigDict. cc.py is the full one; the others edit it."""

"""What the front ends that are compared have in common: a vocabulary, a model's name, a command line."""

import argparse

MODEL = "null"
PIECES = tuple(f" word{i:03d}" for i in range(1_000))  # id -> text


def peer_arguments(description: str | None) -> argparse.Namespace:
    """--port and --step-rate of a server under measurement."""
    parser = argparse.ArgumentParser(description=description)
    add_peer_arguments(parser)
    return parser.parse_args()


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-rate", type=float, default=0.0, help="steps/s; 0: as fast as it goes")

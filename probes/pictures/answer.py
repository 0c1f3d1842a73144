"""What `probe.py map` answers: a picture, a table, or characters in the terminal."""

import json

from rich.console import Console

from probes.arguments import numbers
from probes.commands import Map
from probes.pictures.draw import draw_head, draw_heads, write_csv
from probes.pictures.terminal import print_head, print_heads
from probes.record import AttentionRecord


def show_map(command: Map, record: AttentionRecord) -> None:
    layers = numbers("--layer", command.layer) or record.layers
    heads = numbers("--head", command.head) or range(record.n_head)
    record.check(layers, heads)
    layer, head = layers[0], heads[0]
    is_one_head = command.layer.isdecimal() and command.head.isdecimal()
    if command.output and not is_one_head:
        draw_heads(record, command.output, layers=layers, heads=heads, title=command.title)
    elif command.output.lower().endswith(".csv"):
        write_csv(record, layer, head, command.output)
    elif command.output:
        draw_head(record, layer, head, command.output, title=command.title)
    elif command.json:
        weights = record.weights(layer, head).tolist()
        print(json.dumps({"layer": layer, "head": head, "tokens": record.info.token_texts, "weights": weights}))
    elif is_one_head:
        print_head(record, layer, head, Console())
    else:
        print_heads(record, layers, heads, Console())
    if command.output:
        print(json.dumps({"output": command.output}) if command.json else f"wrote {command.output}")

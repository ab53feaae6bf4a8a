"""Who reads whose answers: graphs of agents. An edge u -> v means that v's prompt contains what u wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import networkx as nx

from kvcomm_p2p.errors import ConfigError

LAYER_WIDTH = 4
SMALL_WORLD_NEIGHBOURS = 4
SMALL_WORLD_REWIRED = 0.1
SCALE_FREE_LINKS = 2
RANDOM_DEGREE = 4.0
DEBATERS = 4

GraphMaker = Callable[[int, int], "nx.DiGraph"]


def full(agents: int, seed: int) -> nx.DiGraph:
    """Everybody reads everybody."""
    return nx.complete_graph(agents, create_using=nx.DiGraph)


def star(agents: int, seed: int) -> nx.DiGraph:
    """One coordinator (0) writes for all and reads all."""
    return nx.star_graph(agents - 1).to_directed()


def chain(agents: int, seed: int) -> nx.DiGraph:
    """Each reads the one before."""
    return nx.path_graph(agents, create_using=nx.DiGraph)


def ring(agents: int, seed: int) -> nx.DiGraph:
    """A chain whose last is read by the first."""
    return nx.cycle_graph(agents, create_using=nx.DiGraph)


def layered(agents: int, seed: int) -> nx.DiGraph:
    """Layers of LAYER_WIDTH; each agent reads the whole layer before."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(agents))
    for agent in range(LAYER_WIDTH, agents):
        first = (agent // LAYER_WIDTH - 1) * LAYER_WIDTH
        graph.add_edges_from((parent, agent) for parent in range(first, first + LAYER_WIDTH))
    return graph


def debate(agents: int, seed: int) -> nx.DiGraph:
    """Groups of DEBATERS in which everybody reads everybody."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(agents))
    for first in range(0, agents, DEBATERS):
        group = range(first, min(first + DEBATERS, agents))
        graph.add_edges_from((u, v) for u in group for v in group if u != v)
    return graph


def random_graph(agents: int, seed: int) -> nx.DiGraph:
    """Erdos-Renyi with RANDOM_DEGREE parents on average."""
    probability = min(1.0, RANDOM_DEGREE / max(agents - 1, 1))
    return nx.gnp_random_graph(agents, probability, seed=seed, directed=True)


def small_world(agents: int, seed: int) -> nx.DiGraph:
    """Watts-Strogatz: neighbours in a ring, a tenth of the edges rewired; both directions."""
    neighbours = min(SMALL_WORLD_NEIGHBOURS, agents - 1)
    return nx.watts_strogatz_graph(agents, neighbours, SMALL_WORLD_REWIRED, seed=seed).to_directed()


def scale_free(agents: int, seed: int) -> nx.DiGraph:
    """Barabasi-Albert: few agents are read by very many; later ones read earlier ones."""
    links = min(SCALE_FREE_LINKS, agents - 1)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(agents))
    graph.add_edges_from((min(u, v), max(u, v)) for u, v in nx.barabasi_albert_graph(agents, links, seed=seed).edges)
    return graph


KINDS: dict[str, GraphMaker] = {
    "full": full,
    "star": star,
    "chain": chain,
    "ring": ring,
    "layered": layered,
    "debate": debate,
    "random": random_graph,
    "small-world": small_world,
    "scale-free": scale_free,
}


def make_graph(kind: str, agents: int, seed: int) -> nx.DiGraph:
    """A graph over agents 0 to `agents` - 1. `kind`: a name of KINDS, or a path to a GraphML file or an edge list ("u v" per
    line), whose nodes are numbered in sorted order. Raises ConfigError, naming the fix."""
    maker = KINDS.get(kind)
    if maker is not None:
        if agents < 2:
            raise ConfigError(f"a graph of {agents} agents has nobody to read: set agents to 2 or more")
        return maker(agents, seed)
    path = Path(kind)
    if not path.is_file():
        known = ", ".join(KINDS)
        raise ConfigError(f"graph = {kind!r} is neither a kind ({known}) nor a file that exists")
    return _read(path, agents)


def _read(path: Path, agents: int) -> nx.DiGraph:
    try:
        if path.suffix == ".graphml":
            graph = nx.DiGraph(nx.read_graphml(path))
        else:
            graph = nx.read_edgelist(path, create_using=nx.DiGraph)
    except Exception as error:  # networkx lets its parsers' errors through, of many kinds
        raise ConfigError(f"{path} is not a graph that can be read (GraphML, or an edge list): {error}") from error
    if graph.number_of_nodes() != agents:
        raise ConfigError(f"{path} has {graph.number_of_nodes()} nodes: set agents to that, not {agents}")
    names = {name: number for number, name in enumerate(sorted(graph.nodes, key=str))}
    return nx.relabel_nodes(graph, names)


def reading_order(graph: nx.DiGraph) -> list[list[int]] | None:
    """Agents in layers, each reading only from earlier ones; None if there are circles."""
    if not nx.is_directed_acyclic_graph(graph):
        return None
    return [sorted(layer) for layer in nx.topological_generations(graph)]

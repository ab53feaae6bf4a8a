"""`kvcomm keys`: who this state directory is to others, and whom its nodes let in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded
from kvcomm_p2p.cli.output import duration, emit, stderr, stdout, write_text
from kvcomm_p2p.cli.setup import load_settings

if TYPE_CHECKING:
    from kvcomm_p2p.net.identity import Allowed

keys = typer.Typer(
    help="Who you are to nodes of other machines and people, and whom you let in. Secrets are never printed.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="What you call them here [default: as before, or their own word].")
]


@keys.command()
@guarded
def new(
    label: Annotated[str, typer.Option("--label", metavar="WORD", help="A word for yourself in your line.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make keys for this state directory (once), and print the line that your peers need."""
    from kvcomm_p2p.net.identity import make_identity, parse_line

    state_dir = load_settings().state_dir
    if label:
        parse_line(_example(label))
    public = make_identity(state_dir).public
    if as_json:
        emit({"line": public.line(label), "fingerprint": public.fingerprint})
        return
    stderr().print(f"fingerprint {public.fingerprint}; give this line to your peers:", markup=False)
    write_text(public.line(label) + "\n")


@keys.command()
@guarded
def show(
    label: Annotated[str, typer.Option("--label", metavar="WORD", help="A word for yourself in your line.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the line that peers paste into `kvcomm keys allow`. It holds nothing secret."""
    from kvcomm_p2p.net.identity import parse_line
    from kvcomm_p2p.net.invitations import require_identity

    public = require_identity(load_settings().state_dir).public
    line = public.line(label)
    parse_line(line)
    if as_json:
        emit({"line": line, "fingerprint": public.fingerprint})
    else:
        stderr().print(f"fingerprint {public.fingerprint}", markup=False)
        write_text(line + "\n")


@keys.command()
@guarded
def allow(
    line: Annotated[str, typer.Argument(metavar="LINE", help="What `kvcomm keys show` printed at your peer's.")],
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Let a peer's nodes connect. Running nodes notice within seconds."""
    from kvcomm_p2p.net.identity import allow as allow_peer

    peer = allow_peer(load_settings().state_dir, line, name)
    _told(peer, "is let in", as_json)


@keys.command()
@guarded
def revoke(
    who: Annotated[str, typer.Argument(metavar="NAME", help="The name, fingerprint or line of a peer.")],
    as_json: AsJson = False,
) -> None:
    """Let a peer in no longer: running nodes cut it off within seconds. It still knows the cluster's secret."""
    from kvcomm_p2p.net.identity import revoke as revoke_peer

    peer = revoke_peer(load_settings().state_dir, who)
    _told(peer, "is let in no longer; to take the cluster's secret from it as well: kvcomm keys rotate", as_json)


@keys.command("list")
@guarded
def list_(as_json: AsJson = False) -> None:
    """List whom your nodes let in."""
    from kvcomm_p2p.net.identity import load_allowed

    allowed = load_allowed(load_settings().state_dir)
    if as_json:
        emit({"allowed": [{"name": peer.label, **_public(peer)} for peer in allowed]}, indent=2)
        return
    if not allowed:
        stderr().print("nobody is let in; with the line that a peer gave you: kvcomm keys allow LINE", markup=False)
    for peer in allowed:
        stdout().print(f"{peer.label}  {peer.public.fingerprint}", markup=False, soft_wrap=True)


@keys.command()
@guarded
def invite(
    line: Annotated[str, typer.Argument(metavar="LINE", help="What `kvcomm keys show` printed at your peer's.")],
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Let a peer in, and print an invitation that hands it the cluster's secret; nobody else can open it."""
    from kvcomm_p2p.net.identity import allow as allow_peer
    from kvcomm_p2p.net.invitations import invite as invite_peer

    state_dir = load_settings().state_dir
    peer = allow_peer(state_dir, line, name)
    word = invite_peer(state_dir, peer.public)
    if as_json:
        emit({"name": peer.label, **_public(peer), "invitation": word})
        return
    stderr().print(
        f"{peer.label} ({peer.public.fingerprint}) is let in; there, run kvcomm keys accept with:", markup=False
    )
    write_text(word + "\n")


@keys.command()
@guarded
def accept(
    invitation: Annotated[str, typer.Argument(metavar="INVITATION", help="What `kvcomm keys invite` printed.")],
    name: Name = "",
    as_json: AsJson = False,
) -> None:
    """Take over the secret of a peer's cluster, and let that peer in. Restart your nodes afterwards."""
    from kvcomm_p2p.net.identity import allow as allow_peer
    from kvcomm_p2p.net.invitations import open_invitation
    from kvcomm_p2p.net.keys import rotate_cluster_key

    settings = load_settings()
    opened = open_invitation(settings.state_dir, invitation)
    peer = allow_peer(settings.state_dir, opened.inviter.line(), name)
    rotate_cluster_key(settings.state_dir, settings.secret_grace_s, opened.secret)
    _told(peer, "is let in, and its cluster's secret is yours: restart your nodes", as_json)


@keys.command()
@guarded
def rotate(as_json: AsJson = False) -> None:
    """Exchange the cluster's secret. The old one opens frames for an hour (setting secret_grace_s): restart your nodes one
    after the other, and invite the peers on other machines again."""
    from kvcomm_p2p.net.keys import rotate_cluster_key

    settings = load_settings()
    until = rotate_cluster_key(settings.state_dir, settings.secret_grace_s)
    if as_json:
        emit({"old_secret_opens_until_unix_s": until})
        return
    stdout().print(
        f"the secret was exchanged; the old one still opens frames for {duration(settings.secret_grace_s)}.\n"
        "Restart your nodes one after the other, and invite peers on other machines again (kvcomm keys invite).\n"
        "Names of contents change with it: restarted nodes reuse nothing of those that are not restarted yet.",
        markup=False,
        soft_wrap=True,
    )


def _told(peer: Allowed, what: str, as_json: bool) -> None:
    if as_json:
        emit({"name": peer.label, **_public(peer)})
    else:
        stdout().print(f"{peer.label} ({peer.public.fingerprint}) {what}", markup=False, soft_wrap=True)


def _public(peer: Allowed) -> dict[str, str]:
    return {"fingerprint": peer.public.fingerprint, "line": peer.public.line(peer.label)}


def _example(label: str) -> str:
    """A line with this label, to check the label before keys are made."""
    from kvcomm_p2p.net.identity import PublicIdentity

    return PublicIdentity(bytes(32), bytes(32)).line(label)

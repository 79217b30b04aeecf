"""Machines, ranks and memberships: the nouns everyone shares. Pure data and arithmetic."""

from trainmover.topology.membership import Member, Membership, MembershipDelta, delta

__all__ = ["Member", "Membership", "MembershipDelta", "delta"]

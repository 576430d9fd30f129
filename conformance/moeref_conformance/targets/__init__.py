"""The targets that ship with the kit: moeref, released bridges, and dumps."""

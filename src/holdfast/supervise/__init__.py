"""The supervisor: a small process that starts the driver as its child and starts it again when it dies.

`strategies` decides, purely, whether and when there is another life. `processes` starts a child and makes sure
that nothing of it is left. `heartbeat` is the child's side of the pipe on which it says that it lives.
`supervisor` is the loop around them. This room knows nothing of epochs, state or Spark: a new life finds in the
pipeline's directory where it stands, as any start does.
"""

package attach

// ExitNoReader is the exit code of a shim that mounted nothing because no reader
// answered, or the one it had was lost: another shim may find one.
const ExitNoReader = 3

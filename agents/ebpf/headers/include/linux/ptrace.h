/* The same registers, by the other name. */
#include <uapi/linux/ptrace.h>

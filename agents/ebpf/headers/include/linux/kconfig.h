/* The kernel options that bcc's helpers ask about. */
#pragma once

#define CONFIG_BPF_SYSCALL 1
#define CONFIG_64BIT 1
#ifndef NULL
#define NULL ((void *)0)
#endif

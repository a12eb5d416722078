/* A kernel new enough for everything that our programs use; bcc asks, our programs do not. */
#pragma once

#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + ((patch) > 255 ? 255 : (patch)))
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 15, 0)
#endif

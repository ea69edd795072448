/* ZE_API marks the functions of the C interfaces, which a library exports. All other symbols stay hidden. */
#ifndef ZEROENGINE_API_H
#define ZEROENGINE_API_H

#if defined(__GNUC__)
#define ZE_API __attribute__((visibility("default")))
#else
#define ZE_API
#endif

#endif

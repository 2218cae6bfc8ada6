/// \file
/// What a process that runs a submission may ask of the system: to read its request, to write its
/// response, and memory.
#pragma once

namespace flashsteps::course {

/// Limits this process, for good, to reads of the request's pipe, writes to the response's, memory
/// that is never executable, and its own end. Any other system call ends it by SIGSYS, but for
/// opening files, which fails. Works without privileges.
///
/// \throws std::runtime_error where the kernel of this machine cannot do it
void close_sandbox();

}  // namespace flashsteps::course
